"""A study: one recipe under a list or a grid of settings. `--help` describes the file for --study."""

from trl_ext.runs.studies.sweep import main

if __name__ == "__main__":
    main()
