"""Prompt templates: text files with a placeholder for the question, built in (by name) or your own (by path)."""

from __future__ import annotations

from pathlib import Path

from trl_ext.registry import nearest

FOLDER = Path(__file__).parent / "prompt_templates"
PLACEHOLDER = "{question}"


def template_names() -> list[str]:
    """The names of the library's templates."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def load_prompt_template(name_or_path: str | Path) -> str:
    """A template's text, without the newline that ends its file.

    Args:
        name_or_path: a name in `template_names()`, or the path of a text file that contains `{question}`.

    Raises:
        FileNotFoundError: it is neither a known name nor a file.
        ValueError: the file has no `{question}`.
    """
    names = template_names()
    path = FOLDER / f"{name_or_path}.txt" if str(name_or_path) in names else Path(name_or_path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no prompt template {str(name_or_path)!r}: there is no such file, and the library has "
            f"{', '.join(names)}{nearest(str(name_or_path), names)}"
        )
    template = path.read_text(encoding="utf-8").removesuffix("\n")
    if PLACEHOLDER not in template:
        raise ValueError(f"{path}: no {PLACEHOLDER} in this prompt template; write it where the question goes")
    return template


def render(template: str, question: str) -> str:
    """Insert the question into the template; other braces in the template or the question are unchanged."""
    return template.replace(PLACEHOLDER, question)
