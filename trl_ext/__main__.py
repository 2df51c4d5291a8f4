"""`python -m trl_ext` and `accelerate launch -m trl_ext train aot`: the `trl-ext` command."""

from trl_ext.cli import main

if __name__ == "__main__":
    main()
