"""A reward model from preference pairs. Without arguments it trains on the embedded benchmark."""

from trl_ext.runs.reward import main

if __name__ == "__main__":
    main()
