"""Any preference loss by name, `--loss simpo`, or your own, `--loss file.py:function`."""

from offline import main

if __name__ == "__main__":
    main()
