"""A few of the kills at random moments of `benchmarks/kills.py`."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.support import REPOSITORY
from tests.support.resume_once import environment


@pytest.mark.long
def test_runs_killed_at_random_moments_end_as_the_straight_one():
    # The moments differ each time; the message of a failure names the seed that repeats it.
    seed = str(int(time.time()))
    command = [sys.executable, "-m", "benchmarks.kills", "--kills", "6", "--trainers", "preference", "policy"]
    done = subprocess.run(
        [*command, "--seed", seed], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=900
    )
    same = "3 kills, largest difference 0, 0 runs with other metrics"
    found = [line for line in done.stdout.splitlines() if "kills" in line]
    assert found == [f"preference: {same}", f"policy: {same}"], (
        f"seed {seed}: {done.stdout[-500:]} {done.stderr[-4000:]}"
    )
