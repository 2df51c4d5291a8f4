"""The README and the pages of the documentation, and the blocks and commands in them."""

from __future__ import annotations

import re

from tests.support import REPOSITORY

# The first page of the built documentation is the README.
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "recipes" / "README.md",
    *(page for page in sorted((REPOSITORY / "docs").rglob("*.md")) if page.name not in ("index.md", "reference.md")),
]
TEXTS = {page.relative_to(REPOSITORY).as_posix(): page.read_text(encoding="utf-8") for page in PAGES if page.exists()}
README = TEXTS["README.md"]
TEXT = "\n".join(TEXTS.values())


def blocks(language: str, text: str = TEXT) -> list[str]:
    """The fenced blocks of a language, such as `python`."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """Those of the blocks in order, then those within sentences and tables."""
    lines = [line for block in blocks("bash", text) for line in block.splitlines() if line.strip()]
    found = [line.partition("  #")[0].strip() for line in lines]
    # Between backquotes a command may be wrapped.
    found += re.findall(r"`(accelerate launch [^`]*recipes/[^`]*)`", text)
    found += re.findall(r"`((?:python (?:-m|recipes/)|(?:time )?make )[^`]*)`", text)
    return list(dict.fromkeys(re.sub(r"\s+", " ", command) for command in found))
