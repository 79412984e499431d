"""Save and resume: complete folders, full or sharded tensors, synchronously or asynchronously."""
