"""GRPO without its two biases. Trains the embedded model by default; needs a --reward_model."""

from online import main

from trl_ext.trainers import DrGRPOConfig, DrGRPOTrainer

if __name__ == "__main__":
    main(DrGRPOConfig, DrGRPOTrainer)
