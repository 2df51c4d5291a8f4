"""Online preference optimisation with optional replay. Trains the embedded model; needs a --reward_model.

To change more than its flags do, copy online.py, which it calls.
"""

from online import main

from trl_ext.trainers import OnlinePreferenceConfig, OnlinePreferenceTrainer

if __name__ == "__main__":
    main(OnlinePreferenceConfig, OnlinePreferenceTrainer)
