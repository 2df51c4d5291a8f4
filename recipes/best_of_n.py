"""Best-of-n sampling against a reward: its gain over n, reward hacking, and data for fine-tuning."""

from trl_ext.studies.best_of_n import main

if __name__ == "__main__":
    main()
