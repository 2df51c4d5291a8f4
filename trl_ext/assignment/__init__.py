"""An assignment from a specification: a starter to fill in, its tests, a grader, and the training runs on both."""
