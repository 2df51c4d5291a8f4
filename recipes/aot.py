"""Alignment via optimal transport. To change more than flags, copy preference.py, which it runs."""

from preference import main

from trl_ext.trainers import AOTConfig, AOTTrainer

if __name__ == "__main__":
    main(AOTConfig, AOTTrainer)
