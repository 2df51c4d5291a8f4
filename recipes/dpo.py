"""Direct preference optimisation. Without arguments it trains the embedded model on the embedded benchmark."""

from preference import main

from trl_ext.trainers import DPOConfig, DPOTrainer

if __name__ == "__main__":
    main(DPOConfig, DPOTrainer)
