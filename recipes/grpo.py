"""Group relative policy optimisation. Needs a --reward_model; to edit it, copy online.py."""

from online import main

from trl_ext.trainers import GRPOConfig, GRPOTrainer

if __name__ == "__main__":
    main(GRPOConfig, GRPOTrainer)
