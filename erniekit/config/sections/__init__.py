"""Declare the parameters, one module for each section of the reference."""
