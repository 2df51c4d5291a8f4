"""Online policy optimization: `PolicyTrainer` and named pairs for common algorithms."""
