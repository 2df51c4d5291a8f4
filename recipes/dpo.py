"""Direct preference optimisation. Without arguments it trains the embedded model on the embedded benchmark.

To change more than its flags do, copy preference.py, which it calls.
"""

from preference import main

from trl_ext.trainers import DPOConfig, DPOTrainer

if __name__ == "__main__":
    main(DPOConfig, DPOTrainer)
