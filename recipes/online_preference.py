"""Online preference optimisation, with replay where asked for. Trains the embedded model; needs a --reward_model."""

from online import main

from trl_ext import OnlinePreferenceConfig, OnlinePreferenceTrainer

if __name__ == "__main__":
    main(OnlinePreferenceConfig, OnlinePreferenceTrainer)
