"""SIGKILL at any instant: what was stored before is read back equal, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("kill_rounds.py")


@pytest.mark.parametrize(
    "rounds",
    [
        int(os.environ.get("HICACHE_KILL_ROUNDS", "40")),
        pytest.param(200, marks=pytest.mark.slow),
    ],
)
def test_rounds_of_sigkill(tmp_path, rounds, capfd):
    run = subprocess.run(
        [sys.executable, DRIVER, tmp_path, str(rounds), "7"],
        capture_output=True,
        text=True,
        timeout=30 + 2 * rounds,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    totals = json.loads(run.stdout.splitlines()[-1])
    assert "error" not in totals, (totals, run.stderr)
    assert totals["rounds"] == rounds
    assert totals["acknowledged"] > 20 * rounds, totals
    assert [totals[name] for name in ("missing", "alien", "bad", "leftovers")] == [0, 0, 0, 0], totals
    # 16 slabs and their tables, and ten other files: nothing grows from round to round.
    assert max(totals["files"]) <= 2 * 16 + 20, totals
    assert "dropped" not in run.stderr, run.stderr
    with capfd.disabled():
        print(f" [{totals['acknowledged']} pages over {rounds} kills]", end="")
