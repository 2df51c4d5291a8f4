"""Direct preference optimisation. Without arguments it trains the embedded model on the embedded benchmark."""

from offline import main

from trl_ext import DPOConfig, DPOTrainer

if __name__ == "__main__":
    main(DPOConfig, DPOTrainer)
