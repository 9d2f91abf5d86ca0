"""A minute of everything at once: the script that anyone can run for hours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "torture.py"
SECONDS = 57


@pytest.mark.slow
def test_a_minute_of_torture(tmp_path, capfd):
    run = subprocess.run(
        [sys.executable, SCRIPT, "--seconds", str(SECONDS), "--seed", "11", "--dir", tmp_path, "--json"],
        capture_output=True,
        text=True,
        timeout=SECONDS + 120,
    )
    assert run.stdout, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    assert run.returncode == 0, run.stdout
    # What no run may ever find, and enough of what it is there for, on a machine with other things to do.
    for name in ("wrong_bytes", "stuck_calls", "leaks", "missing", "over_capacity", "crashes", "errors"):
        assert summary[name] == 0, summary
    assert summary["seed"] == 11
    assert summary["seconds"] >= SECONDS
    assert summary["kills"] > SECONDS / 3, summary
    assert summary["reads_checked"] > 1000 * SECONDS / 10, summary
    for name in (
        "stops",
        "massacres",
        "pages_stored",
        "refused",
        "exports",
        "late_pages",
        "verified_after_restart",
    ):
        assert summary[name] > 0, (name, summary)
    assert sum(summary["damage"].values()) > SECONDS / 3, summary
    assert not list(tmp_path.iterdir())
    with capfd.disabled():
        print(f" [{summary['kills']} kills, {summary['reads_checked']} pages checked]", end="")


def test_a_usage_error_touches_nothing(tmp_path):
    run = subprocess.run([sys.executable, SCRIPT, "--seconds", "0"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "--seconds" in run.stderr
