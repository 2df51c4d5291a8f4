"""Published studies: results of finished runs that come with the package, to look at and to compare with.

A study is a folder of runs `{method}-{seed}`. Each has the `results.json`, `config.yaml` and `metrics.jsonl` of its
run in short, `prompts.jsonl` with the scores and lengths of every held-out prompt, and `generations.jsonl` with the
responses to ten of them. The report and the comparison of methods read these folders like those of any run.
"""

from __future__ import annotations

from pathlib import Path

from trl_ext.registry import nearest

DATA = Path(__file__).parent / "data"


def studies() -> list[str]:
    """Names of the studies that come with the package."""
    return sorted(path.name for path in DATA.iterdir() if path.is_dir()) if DATA.is_dir() else []


def study_folder(study: str) -> Path:
    """The folder of a study.

    Raises:
        ValueError: there is none; the message names those that there are.
    """
    known = studies()
    if study not in known:
        what = f"{nearest(study, known)} Published: {', '.join(known)}" if known else ": no study is published yet"
        raise ValueError(f"no published study {study!r}{what}")
    return DATA / study


def method_and_seed(folder: Path) -> tuple[str, int] | None:
    """The parts of a run's name `{method}-{seed}`; None if it is not of this form."""
    method, _, seed = folder.name.rpartition("-")
    return (method, int(seed)) if method and seed.isdecimal() else None


__all__ = ["DATA", "method_and_seed", "studies", "study_folder"]
