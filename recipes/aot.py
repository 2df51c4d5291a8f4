"""Alignment via optimal transport. Without arguments it trains the embedded model on the embedded benchmark."""

from preference import main

from trl_ext.trainers import AOTConfig, AOTTrainer

if __name__ == "__main__":
    main(AOTConfig, AOTTrainer)
