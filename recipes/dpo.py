"""Direct preference optimisation. Without arguments it trains the embedded model on the embedded benchmark."""

from trl_ext.runs.offline import main
from trl_ext.trainers import DPOConfig, DPOTrainer

if __name__ == "__main__":
    main(DPOConfig, DPOTrainer)
