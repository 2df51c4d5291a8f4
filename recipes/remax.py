"""REINFORCE with a greedy baseline. Trains the embedded model by default; needs a --reward_model.

To change more than its flags do, copy online.py, which it calls.
"""

from online import main

from trl_ext.trainers import ReMaxConfig, ReMaxTrainer

if __name__ == "__main__":
    main(ReMaxConfig, ReMaxTrainer)
