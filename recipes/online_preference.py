"""Online preference optimisation with optional replay. Needs a --reward_model; to edit it, copy online.py."""

from online import main

from trl_ext.trainers import OnlinePreferenceConfig, OnlinePreferenceTrainer

if __name__ == "__main__":
    main(OnlinePreferenceConfig, OnlinePreferenceTrainer)
