"""Proximal policy optimisation with a value function. Trains the embedded model by default; needs a --reward_model."""

from online import main

from trl_ext.trainers import PPOConfig, PPOTrainer

if __name__ == "__main__":
    main(PPOConfig, PPOTrainer)
