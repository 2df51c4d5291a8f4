"""Identity preference optimisation. To change more than flags, copy preference.py, which it runs."""

from preference import main

from trl_ext.trainers import IPOConfig, IPOTrainer

if __name__ == "__main__":
    main(IPOConfig, IPOTrainer)
