"""What is copied into an assignment's folders: it needs torch at most, and nothing else of trl_ext."""
