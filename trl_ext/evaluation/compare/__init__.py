"""The command `python -m trl_ext.evaluation.compare`; the function `compare` is imported from `trl_ext.evaluation`."""
