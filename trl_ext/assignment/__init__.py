"""Write an assignment from a solved package: a starter to fill in, its tests, a grader, and training runs."""
