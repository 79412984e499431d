"""Training: loop, optimizer, schedules, checkpoints and callbacks, generic over the loss and the data plan."""
