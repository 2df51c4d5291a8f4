"""The command-line application behind `recipes/`: arguments, run folders, training drivers and results.

What a user can correct is a ValueError, an OSError or an ImportError of one line, which the recipes print.
Importing this package sets default environment variables, because the libraries read them only once, on import.
"""

import os
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
# A wheel contains the recipes and the public evaluation inside the package; a clone has them next to it.
SCRIPTS = _PACKAGE / "scripts" if (_PACKAGE / "scripts").is_dir() else _PACKAGE.parent
RECIPES = SCRIPTS / "recipes"

# No telemetry unless the user asks for it.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# Clear progress bars when they are full, and disable them without a terminal.
os.environ.setdefault("TQDM_LEAVE", "")
if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")


def recipes_can_be_imported() -> None:
    """Let a recipe import another one, as Python does for a script by itself, but `runpy` does not."""
    if sys.path[:1] != [str(RECIPES)]:
        sys.path.insert(0, str(RECIPES))
