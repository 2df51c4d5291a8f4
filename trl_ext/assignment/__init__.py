"""Create an assignment from a specification: a starter to fill in, its tests, a grader, and training runs."""
