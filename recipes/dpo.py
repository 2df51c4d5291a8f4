"""Direct preference optimisation. To change more than flags, copy preference.py, which it runs."""

from preference import main

from trl_ext.trainers import DPOConfig, DPOTrainer

if __name__ == "__main__":
    main(DPOConfig, DPOTrainer)
