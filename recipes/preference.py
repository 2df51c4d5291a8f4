"""Any preference loss by name, `--loss simpo`, or your own, `--loss file.py:function`."""

from trl_ext.runs.offline import main

if __name__ == "__main__":
    main()
