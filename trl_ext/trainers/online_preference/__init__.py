"""Preference optimization on the policy's own samples: `OnlinePreferenceTrainer`."""
