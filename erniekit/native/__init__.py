"""CPU kernels of our own in C, and products through the oneDNN library of Paddle's wheel; all called by ctypes."""
