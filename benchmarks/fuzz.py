"""Damaged input through everything that reads a user's files: what is accepted, what is refused, and what is a defect.

`python -m benchmarks.fuzz --cases 2000 --seed 0` damages small valid files in the ways of `MUTATIONS` and gives them
to the loaders of benchmarks, of problems and of instruction examples, to the readers of submissions, to the commands
of `public_eval`, and, as YAML (`YAML_MUTATIONS`), to the recipes' argument parser. A refusal must be a ValueError or
an OSError with one line of at most 500 characters that names the file; every row must be loaded or reported; no case
may take 5 seconds. Anything else counts as a defect and is listed. `--json` prints the figures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._damage import MUTATIONS, YAML_KEYS, YAML_MUTATIONS, place
from benchmarks._damage_targets import COMMANDS, READERS, YAML_TARGET, Outcome, prepare, write_neighbours

SLOW_SECONDS = 5.0
STUCK_SECONDS = 30
MESSAGE_LIMIT = 500


class Stuck(BaseException):
    """A reader that did not come back."""


def _stop(*_: Any) -> None:
    raise Stuck


@dataclass(frozen=True)
class Case:
    """One damaged file through one reader. `defect` is None where it was accepted or refused as it should be."""

    number: int
    mutation: str
    target: str
    accepted: bool
    defect: str | None
    message: str
    seconds: float


def run_cases(count: int, seed: int, folder: Path, *, commands: bool = True) -> list[Case]:
    """Run cases in a folder of their own, every mutation in turn; the same seed gives the same files.

    Args:
        count: how many.
        seed: of the damage.
        folder: where files are written and removed again; the commands' fixed inputs stay.
        commands: whether to call the commands and the recipes' parser as well, which imports torch and trl.
    """
    write_neighbours(folder)
    importlib.import_module("datasets")
    importlib.import_module("torch")
    signal.signal(signal.SIGALRM, _stop)
    plan = [(name, target) for name in MUTATIONS for target in READERS]
    if commands:
        prepare()
        plan += [(name, target) for name in MUTATIONS for target in COMMANDS]
        plan += [(name, YAML_TARGET) for name in YAML_MUTATIONS]
    # Every pair once before any comes again.
    order = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        order.shuffle(plan)
        for mutation, target in plan[: count - len(cases)]:
            cases.append(run_case(len(cases), mutation, target, seed, folder))
    return cases


def run_case(number: int, mutation: str, target: str, seed: int, folder: Path) -> Case:
    """Damage one file, read it, and hold what comes back against what must."""
    generator = random.Random(f"{seed}/{number}/{mutation}/{target}")
    reader = READERS.get(target) or COMMANDS.get(target)
    if target == YAML_TARGET:
        from benchmarks._damage_targets import read_yaml as read

        path, damaged = folder / "arguments.yaml", YAML_MUTATIONS[mutation](generator)
    else:
        path, read = folder / reader.file, reader.read
        damaged = MUTATIONS[mutation](generator, reader.rows(generator))
    with place(path, damaged):
        # Processor time, so that a busy machine makes no defect; what waits for ever is stopped by the alarm.
        start = time.process_time()
        try:
            signal.alarm(STUCK_SECONDS)
            outcome = read(path, folder)
        except Stuck as error:
            outcome = Outcome([error])
        finally:
            signal.alarm(0)
        seconds = time.process_time() - start
        defect = _defect(outcome, path, damaged if isinstance(damaged, bytes) else None, seconds)
    message = str(outcome.errors[0])[:300] if outcome.errors else ""
    return Case(number, mutation, target, not outcome.errors, defect, message, seconds)


def _defect(outcome: Outcome, path: Path, content: bytes | None, seconds: float) -> str | None:
    if seconds > SLOW_SECONDS:
        return f"slow: {seconds:.1f} s"
    defects = [_defect_of_error(error, path) for error in outcome.errors]
    defects += [_defect_of_line(note) for note in outcome.notes]
    found = next((defect for defect in defects if defect), None)
    if found:
        return found
    if outcome.unreadable or content is None or outcome.loaded is None:
        return None
    rows = count_rows(content)
    if outcome.loaded + outcome.reported != rows:
        return f"rows lost: {outcome.loaded} loaded + {outcome.reported} reported of {rows}"
    return None


def _defect_of_error(error: BaseException, path: Path) -> str | None:
    if not isinstance(error, ValueError | OSError):
        return f"traceback: {type(error).__name__}"
    # A configuration that reads well may hold a value that its key does not take.
    # Rows and the settings beside them share the start of their names.
    named = (
        path.name.split(".")[0] in str(error) or path.suffix == ".yaml" and any(key in str(error) for key in YAML_KEYS)
    )
    # Sound prompts of another task are named by their row, to choose another judge for them.
    named = named or "choose another judge" in str(error)
    return _defect_of_line(str(error)) or (None if named else f"does not name the file ({type(error).__name__})")


def _defect_of_line(message: str) -> str | None:
    if len(message) > MESSAGE_LIMIT:
        return f"message of over {MESSAGE_LIMIT} characters"
    return None if message.isprintable() else "message is not one printable line"


def count_rows(content: bytes) -> int:
    """Lines of a file that are not blank."""
    return sum(bool(line.strip()) for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"))


def summary(cases: list[Case]) -> dict:
    """Counts by mutation and by target, the defects by kind, and what the slowest case took."""

    def counts(key: str) -> dict[str, dict[str, int]]:
        names = list(dict.fromkeys(getattr(case, key) for case in cases))
        rows = {}
        for name in sorted(names):
            own = [case for case in cases if getattr(case, key) == name]
            defects = sum(case.defect is not None for case in own)
            accepted = sum(case.accepted and case.defect is None for case in own)
            rows[name] = {
                "cases": len(own),
                "accepted": accepted,
                "refused": len(own) - accepted - defects,
                "defects": defects,
            }
        return rows

    slowest = max(cases, key=lambda case: case.seconds)
    return {
        "cases": len(cases),
        "mutations": counts("mutation"),
        "targets": counts("target"),
        "defects": dict(Counter(f"{case.target}: {case.defect}" for case in cases if case.defect).most_common()),
        "slowest": asdict(slowest),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers_only", action="store_true", help="leave out the commands and the recipes' parser")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        cases = run_cases(arguments.cases, arguments.seed, Path(folder), commands=not arguments.readers_only)
    result = {**summary(cases), "seconds": time.perf_counter() - start}
    result["defective"] = [asdict(case) for case in cases if case.defect]
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)
    sys.exit(1 if result["defective"] else 0)


def _print(result: dict) -> None:
    for key in ("mutations", "targets"):
        print(f"{key[:-1]:<28} {'cases':>6} {'accepted':>9} {'refused':>8} {'defects':>8}")
        for name, row in result[key].items():
            print(f"{name:<28} {row['cases']:>6} {row['accepted']:>9} {row['refused']:>8} {row['defects']:>8}")
        print()
    for case in result["defective"][:40]:
        print(
            f"case {case['number']}, {case['mutation']}, {case['target']}: {case['defect']}: {case['message'][:160]!r}"
        )
    slowest = result["slowest"]
    print(
        f"{result['cases']} cases in {result['seconds']:.0f} s, {len(result['defective'])} defects; slowest "
        f"{slowest['seconds']:.2f} s ({slowest['mutation']}, {slowest['target']}); "
        f"peak memory {result['peak_megabytes']:.0f} MB"
    )


if __name__ == "__main__":
    main()
