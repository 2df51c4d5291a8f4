"""Any online algorithm: by name, `--algorithm dapo`, or your own, `file.py:name`; needs a --reward_model."""

from trl_ext.runs.online import main

if __name__ == "__main__":
    main()
