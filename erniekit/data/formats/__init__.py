"""Read records of every file format and record layout, and report problems by line."""
