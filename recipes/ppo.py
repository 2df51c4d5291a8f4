"""Proximal policy optimisation with a value function. Needs a --reward_model; to edit it, copy online.py."""

from online import main

from trl_ext.trainers import PPOConfig, PPOTrainer

if __name__ == "__main__":
    main(PPOConfig, PPOTrainer)
