"""Group sequence policy optimisation. Needs a --reward_model; to edit it, copy online.py."""

from online import main

from trl_ext.trainers import GSPOConfig, GSPOTrainer

if __name__ == "__main__":
    main(GSPOConfig, GSPOTrainer)
