"""REINFORCE with a greedy baseline. Needs a --reward_model; to edit it, copy online.py."""

from online import main

from trl_ext.trainers import ReMaxConfig, ReMaxTrainer

if __name__ == "__main__":
    main(ReMaxConfig, ReMaxTrainer)
