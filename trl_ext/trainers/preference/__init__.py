"""Offline preference optimization: `PreferenceTrainer` and a named pair for each loss."""
