"""Read records of every file format and layout, with the line of each problem."""
