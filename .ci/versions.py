"""The versions that the workflow tests: the Pythons and the releases of TRL that pyproject.toml permits.

    python .ci/versions.py matrix          # the jobs, as GitHub reads them
    python .ci/versions.py pin oldest      # constraints.txt then asks for that release of TRL

To add a Python, add a classifier; to add a release of TRL, move a bound of the requirement. This file stays the same.
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


def trl_bounds() -> tuple[str, str]:
    """The inclusive lower and the exclusive upper bound on TRL's release, such as 1.16 and 1.17."""
    requirement = next(name for name in project()["dependencies"] if name.startswith("trl>="))
    oldest, below = re.fullmatch(r"trl>=([\d.]+),<([\d.]+)", requirement).groups()
    return oldest, below


def requirement(which: str) -> str:
    """The line of constraints.txt for the `oldest` or the `newest` permitted TRL."""
    oldest, below = trl_bounds()
    return f"trl~={oldest}.0" if which == "oldest" else f"trl>={oldest},<{below}"


def matrix() -> dict[str, list[dict[str, str]]]:
    """Every Python with the pinned versions, and the oldest and newest TRL, which may be the same release."""
    jobs = [{"python": version, "trl": "pinned"} for version in pythons()]
    (major, oldest), (_, below) = (map(int, bound.split(".")) for bound in trl_bounds())
    ends = ["newest"] if below == oldest + 1 else ["oldest", "newest"]
    return {"include": [*jobs, *({"python": pythons()[0], "trl": end} for end in ends)]}


def pin(which: str) -> None:
    """Replace the requirement of TRL in constraints.txt; `pinned` leaves it unchanged."""
    path = ROOT / "constraints.txt"
    if which != "pinned":
        text = re.sub(r"^trl==.*$", requirement(which), path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["matrix"]:
        print(json.dumps(matrix()))
    elif sys.argv[1:2] == ["pin"] and sys.argv[2:] in (["pinned"], ["oldest"], ["newest"]):
        pin(sys.argv[2])
    else:
        raise SystemExit(__doc__)
