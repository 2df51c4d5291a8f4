"""Measure the time and size of a report on ten runs, with short responses and with responses of 256 tokens.

`python -m benchmarks.report_time --run runs/grpo-toy` copies a run ten times and marks the responses of each copy, so
that the report stores them separately, like those of ten methods; prompts and base responses are shared. It measures
the responses as they are, and repeated up to 1,000 characters, about 256 tokens of English. It prints a table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILES = ("results.json", "metrics.jsonl", "generations.jsonl", "reward_mistakes.jsonl")
LONG_RESPONSE = 1000


def copy_runs(run: Path, folder: Path, *, copies: int, characters: int | None) -> None:
    """Copies of a run; responses are repeated to at least `characters`, or left as they are for None."""
    for index in range(copies):
        copy = folder / f"run-{index}"
        copy.mkdir(parents=True)
        for name in FILES:
            if (run / name).is_file():
                shutil.copy(run / name, copy / name)
        rows = [json.loads(line) for line in (run / "generations.jsonl").read_text().split("\n") if line]
        for row in rows:
            row["response_text"] = f"{_repeated(row['response_text'], characters)} ({index})"
            row["base_response_text"] = _repeated(row["base_response_text"], characters)
        (copy / "generations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(folder: Path) -> tuple[float, float, int, int]:
    """Seconds of the command, including the start of Python, and of the report alone; bytes of both files."""
    from trl_ext.evaluation import write_report

    out = folder / "report.html"
    start = time.perf_counter()
    command = [sys.executable, "-m", "trl_ext.evaluation.report", str(folder), "--out", str(out), "--json"]
    subprocess.check_output(command)
    command_seconds = time.perf_counter() - start
    start = time.perf_counter()
    write_report(folder, out)
    report_seconds = time.perf_counter() - start
    return command_seconds, report_seconds, out.stat().st_size, out.with_suffix(".md").stat().st_size


def _repeated(text: str, characters: int | None) -> str:
    return text if characters is None else f"{text} " * (characters // (len(text) + 1) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a policy's run")
    parser.add_argument("--copies", type=int, default=10)
    arguments = parser.parse_args()
    print(f"{'responses':>18}  {'command s':>9}  {'report s':>8}  {'HTML MB':>7}  {'Markdown kB':>11}")
    for name, characters in (("as they are", None), (f"{LONG_RESPONSE:,} characters", LONG_RESPONSE)):
        with tempfile.TemporaryDirectory() as folder:
            copy_runs(arguments.run, Path(folder), copies=arguments.copies, characters=characters)
            command, report, html, markdown = measure(Path(folder))
        print(f"{name:>18}  {command:>9.2f}  {report:>8.2f}  {html / 1e6:>7.2f}  {markdown / 1e3:>11.1f}")


if __name__ == "__main__":
    main()
