"""Evaluation as a row: a task is data, a prompt and a check in YAML; `trl-ext evaluate` runs it."""
