"""Group sequence policy optimisation. Trains the embedded model by default; needs a --reward_model."""

from online import main

from trl_ext.trainers import GSPOConfig, GSPOTrainer

if __name__ == "__main__":
    main(GSPOConfig, GSPOTrainer)
