"""Runs that are compared: comparisons of methods over seeds, and the RLHF pipeline."""
