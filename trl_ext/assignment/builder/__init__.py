"""Build the folders of a starter and its grader from a specification."""
