"""Reward models: `RewardTrainer`."""
