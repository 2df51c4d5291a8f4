"""The versions that the checks use: the Pythons and the ends of the ranges of packages that pyproject.toml permits.

    python .ci/versions.py pythons         # the Pythons, as GitHub's matrix reads them
    python .ci/versions.py oldest          # constraints for pip: the oldest permitted release of every package
    python .ci/versions.py newest          # the newest, which pip chooses itself

Both ends take the torch of constraints.txt, since other releases have no build for CPUs alone everywhere.
To add a Python, add a classifier; to permit another release, move a bound. This file stays the same.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pythons() -> list[str]:
    """Versions of Python, the oldest first."""
    found = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", name) for name in project()["classifiers"])
    return [match[1] for match in found if match]


def constraints(which: str) -> list[str]:
    """Lines of a constraints file: torch of the pins, and for `oldest` the lower bound of every other requirement."""
    torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)[0]
    if which == "newest":
        return [torch]
    requirements = [*project()["dependencies"], *sum(project()["optional-dependencies"].values(), [])]
    bounds = (re.match(r"([\w.-]+)(?:\[[\w,]+\])?>=(\d+)(?:\.(\d+))?", line) for line in requirements)
    lowest = {match[1]: f"{match[2]}.{match[3] or 0}" for match in bounds if match}
    return [torch, *(f"{name}=={version}.*" for name, version in lowest.items() if name != "torch")]


if __name__ == "__main__":
    if sys.argv[1:] == ["pythons"]:
        print(json.dumps(pythons()))
    elif sys.argv[1:] in (["oldest"], ["newest"]):
        print(*constraints(sys.argv[1]), sep="\n")
    else:
        raise SystemExit(__doc__)
