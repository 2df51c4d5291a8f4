"""Group relative policy optimisation. Trains the embedded model by default; needs a --reward_model."""

from online import main

from trl_ext.trainers import GRPOConfig, GRPOTrainer

if __name__ == "__main__":
    main(GRPOConfig, GRPOTrainer)
