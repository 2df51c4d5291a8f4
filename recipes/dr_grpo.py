"""GRPO without its two biases. Needs a --reward_model; to edit it, copy online.py."""

from online import main

from trl_ext.trainers import DrGRPOConfig, DrGRPOTrainer

if __name__ == "__main__":
    main(DrGRPOConfig, DrGRPOTrainer)
