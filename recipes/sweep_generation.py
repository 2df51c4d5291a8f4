"""A sweep over generation settings: decoding, length, prompt template and few-shot examples."""

from trl_ext.runs.studies.generation_sweep import main

if __name__ == "__main__":
    main()
