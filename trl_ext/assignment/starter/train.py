"""Train on your own functions: `python train.py --recipe NAME`. See README.md."""

from trl_ext.assignment.train import main

if __name__ == "__main__":
    main()
