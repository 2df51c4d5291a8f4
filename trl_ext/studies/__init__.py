"""Studies of several runs: comparisons of methods over seeds, the RLHF pipeline, and best-of-n sampling."""
