"""Evaluation on problems with known answers. Without arguments it uses the embedded model and embedded additions."""

from trl_ext.runs.studies.evaluate_math import main

if __name__ == "__main__":
    main()
