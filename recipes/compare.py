"""A fair comparison of methods over several seeds. `--help` describes the files that it reads."""

from trl_ext.studies.study import main

if __name__ == "__main__":
    main()
