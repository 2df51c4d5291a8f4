"""Files that are copied into an assignment's folders: they need at most torch, and nothing else of trl_ext."""
