"""A few of the kills at random moments of `benchmarks/kills.py`."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.resume_once import REPOSITORY, environment


@pytest.mark.slow
def test_runs_killed_at_random_moments_end_as_the_straight_one(tmp_path):
    # Other moments each time; what is printed names the seed that repeats a failure.
    seed = str(int(time.time()))
    command = [sys.executable, "-m", "benchmarks.kills", "--kills", "6", "--trainers", "preference", "policy"]
    done = subprocess.run(
        [*command, "--seed", seed, "--json", str(tmp_path / "kills.json")],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-4000:]}"
    rows = json.loads((tmp_path / "kills.json").read_text())["rows"]
    assert [row["kills"] for row in rows] == [3, 3]
    for row in rows:
        assert row["difference"] == 0 and row["metrics differ"] == 0, f"seed {seed}: {row}"
