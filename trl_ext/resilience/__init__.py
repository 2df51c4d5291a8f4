"""Exact resuming of runs, and one clear message when the machine or the data ends a run."""
