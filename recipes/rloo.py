"""REINFORCE leave-one-out. Needs a --reward_model; to edit it, copy online.py."""

from online import main

from trl_ext.trainers import RLOOConfig, RLOOTrainer

if __name__ == "__main__":
    main(RLOOConfig, RLOOTrainer)
