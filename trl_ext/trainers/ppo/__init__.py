"""PPO with a value model: `PPOTrainer`."""
