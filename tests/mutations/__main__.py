"""Plant known mistakes in a copy of the library, one at a time, and record which test notices each.

    python -m tests.mutations --json tests/mutations/killed.json
    python -m tests.mutations --compare tests/mutations/killed.json

A mistake is a row of planted.jsonl: the text `old` of `file`, which occurs there once, becomes `new`, and the modules
`tests` run one after another until a test fails. Modules are named without their folder. Their slow tests run only if
they are named, as `module::test`.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
# How long a test module may take.
SECONDS = 120
# Every child process inherits the environment of the tests, and what is slow to import and never edited.
IMPORTED_ONCE = ["tests.conftest", "pytest", "scipy.stats", "transformers.models.qwen2.modeling_qwen2"]
IMPORTED_ONCE += [f"trl.trainer.{name}_trainer" for name in ("dpo", "grpo", "kto", "reward", "rloo", "sft")]
# Tests that fail without a mistake, which are left out.
BROKEN: list[str] = []
SURVIVED, GONE, TIMEOUT, CRASHED = "survived", "gone", "timeout", "crashed"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", default=[], help="these mistakes")
    parser.add_argument("--jobs", type=int, default=1, help="mistakes at once")
    parser.add_argument("--wide", action="store_true", help="try the tests of all rows on what survives its own")
    parser.add_argument("--json", type=Path, help="write the outcomes: the test that noticed, survived or gone")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="list what was killed then and is not now")
    options = parser.parse_args()
    rows = [json.loads(line) for line in (HERE / "planted.jsonl").read_text().splitlines()]
    every_test = list(dict.fromkeys(name for row in rows for name in row["tests"]))
    rows = [row for row in rows if not options.only or row["id"] in options.only]
    places = {name: _place(name) for name in every_test}
    if missing := [name for name in every_test if places[name] is None]:
        print(f"no such test modules: {', '.join(missing)}", flush=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies = [_copy(Path(folder) / str(number)) for number in range(options.jobs)]
        further = [name for name in every_test if options.wide and "::" not in name]
        tests = {row["id"]: filter(None, map(places.get, dict.fromkeys(row["tests"] + further))) for row in rows}
        tasks = [(row, list(tests[row["id"]])) for row in rows]
        found, again = {}, tasks
        while again:
            for row, outcome in _run(copies, again):
                found[row["id"]] = outcome
                print(f"{len(found)}/{len(rows)} {row['id']}: {outcome}", flush=True)
            killers = sorted({found[row["id"]] for row, _ in again} - {SURVIVED, GONE, TIMEOUT, CRASHED})
            checks = _run(copies, [({"id": test}, [test]) for test in killers])
            BROKEN.extend(row["id"] for row, outcome in checks if outcome != SURVIVED)
            again = [(row, tests) for row, tests in tasks if found[row["id"]] in BROKEN]
    survived, gone = (list(found.values()).count(kind) for kind in (SURVIVED, GONE))
    print("".join(f"fails without a mistake: {test}\n" for test in BROKEN), end="")
    print(f"{len(found)} mistakes: {len(found) - survived - gone} killed, {survived} survived, {gone} gone")
    if options.json:
        options.json.write_text(json.dumps(found, indent=0) + "\n")
    before = json.loads(options.compare.read_text()) if options.compare else {}
    lost = [name for name in found if found[name] in (SURVIVED, GONE) and name in before]
    lost = [name for name in lost if before[name] not in (SURVIVED, GONE)]
    for name in lost:
        print(f"{name}: {found[name]}, was killed by {before[name]}")
    return int(SURVIVED in map(found.get, lost))


def _place(name: str) -> str | None:
    """Where a test module, or a test, is; None if there is no such module."""
    module, separator, test = name.partition("::")
    path = next(HERE.parent.rglob(f"{module}.py"), None)
    return None if path is None else f"{path.relative_to(REPOSITORY)}{separator}{test}"


def _copy(folder: Path) -> Path:
    """A copy of the files that Git does not ignore, compiled."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    compileall.compile_dir(folder / "trl_ext", quiet=2)
    return folder


def _run(copies: list[Path], tasks: list[tuple[dict, list[str]]]) -> Iterator[tuple[dict, str]]:
    """Yield the row and the outcome of each task, as many at once as there are copies."""
    waiting, free, running = tasks[::-1], list(copies), {}
    while waiting or running:
        while waiting and free:
            row, tests = waiting.pop()
            restore = _plant(free[-1], row)
            if restore is None:
                yield row, GONE
                continue
            process = _start(free[-1], tests)
            running[process] = row, free.pop(), restore, time.monotonic() + SECONDS * len(tests)
        for process, (row, copy, restore, end) in list(running.items()):
            if not (ended := os.waitpid(process, os.WNOHANG)[0]) and time.monotonic() < end:
                continue
            # What the tests have started ends with them.
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            if not ended:
                os.waitpid(process, 0)
            restore()
            free.append(copy)
            del running[process]
            told = copy.with_suffix(".scratch") / "outcome.txt"
            yield row, TIMEOUT if not ended else told.read_text() if told.exists() else CRASHED
        time.sleep(0.05)


def _plant(copy: Path, row: dict) -> Callable[[], object] | None:
    """Edit the copy and return what restores it; None where the text is not there exactly once."""
    if "file" not in row:
        return lambda: None
    path = copy / row["file"]
    if not path.exists():  # It may have been moved.
        holders = [each for each in (copy / "trl_ext").rglob("*.py") if row["old"] in each.read_text()]
        path = holders[0] if len(holders) == 1 else path
    text = path.read_text() if path.exists() else ""
    if text.count(row["old"]) != 1:
        return None
    seconds = path.stat().st_mtime
    path.write_text(text.replace(row["old"], row["new"]))
    # Python uses the compiled file only while the time of the source is as it was.
    os.utime(path, (seconds + 100, seconds + 100))
    return lambda: (path.write_text(text), os.utime(path, (seconds, seconds)))


def _start(copy: Path, tests: list[str]) -> int:
    """Run test modules in a child process, which writes its outcome; returns the child's number."""
    scratch = copy.with_suffix(".scratch")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    if process := os.fork():
        return process
    try:
        os.setsid()
        os.chdir(copy)
        for stream in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        os.environ |= {"PYTHONPATH": str(copy), "TMPDIR": str(scratch)}
        import datasets

        # What a mistake has left in a cache must not reach the next one.
        tempfile.tempdir, datasets.config.HF_DATASETS_CACHE = str(scratch), scratch / "datasets"
        sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() != REPOSITORY)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        (scratch / "outcome.txt").write_text(next(filter(None, map(_failure, tests)), SURVIVED))
    finally:
        os._exit(0)


def _failure(test: str) -> str | None:
    """The first test of a module to fail; None if none does."""
    import pytest

    failed = []

    class Recorder:
        def pytest_runtest_logreport(self, report):
            failed.extend([report.nodeid] * report.failed)

        pytest_collectreport = pytest_runtest_logreport

    options = ["-x", "-q", "-p", "no:cacheprovider", *(f"--deselect={name}" for name in BROKEN)]
    options += [] if "::" in test else ["-m", "not slow"]
    code = pytest.main([*options, test], plugins=[Recorder()])
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    return failed[0] if failed else f"{test}: {code.name}"


sys.exit(main())
