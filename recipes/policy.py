"""Any online algorithm by name: `--algorithm dapo` or `file.py:name`; needs a --reward_model."""

from online import main

if __name__ == "__main__":
    main()
