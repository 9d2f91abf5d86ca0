"""Trials of engines in child processes, with a deadline; a process remembers their verdicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DEADLINE_S = 20.0
_CODE = """
import json, sys
order = json.loads(sys.argv[1])
sys.path[:] = order["path"]
from hicache_tier_storage.trial import main
main(order)
"""
_LOCK = threading.Lock()
_KNOWN: dict[tuple[object, ...], str] = {}


@dataclass(frozen=True, slots=True)
class Trial:
    """What to try: a function of `trial.py` and its options."""

    name: str
    directory: Path
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        """What a verdict holds for: the file system, not the directory."""
        return (self.name, self.directory.stat().st_dev, *sorted(self.options.items()))


def try_all(trials: Sequence[Trial], deadline_s: float = DEADLINE_S) -> list[str]:
    """Return "" or a reason for each trial; those not known yet run side by side."""
    with _LOCK:
        running = {}
        for trial in trials:
            if trial.key not in _KNOWN and trial.key not in running:
                try:
                    running[trial.key] = _start(trial)
                except OSError as error:
                    _KNOWN[trial.key] = f"no process to try it in: {error.strerror}"
        until = time.monotonic() + deadline_s
        for key, child in running.items():
            _KNOWN[key] = _verdict(child, until, deadline_s)
        return [_KNOWN[trial.key] for trial in trials]


def forget() -> None:
    """Try everything anew."""
    with _LOCK:
        _KNOWN.clear()


def _start(trial: Trial) -> subprocess.Popen[bytes]:
    order = {
        "trial": trial.name,
        "directory": str(trial.directory),
        "options": trial.options,
        "path": sys.path,
    }
    return subprocess.Popen(
        [sys.executable, "-c", _CODE, json.dumps(order)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _verdict(child: subprocess.Popen[bytes], until: float, deadline_s: float) -> str:
    try:
        output, errors = child.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        try:
            child.communicate(timeout=1)
        except subprocess.TimeoutExpired:  # stuck in the kernel
            _close_pipes(child)
        return f"did not answer within {deadline_s:.0f} s"
    for line in reversed(output.decode(errors="replace").splitlines()):
        try:
            return str(json.loads(line)["why"])
        except (ValueError, KeyError, TypeError):
            continue
    last = errors.decode(errors="replace").strip().splitlines()[-1:] or [""]
    ended = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
    return f"the trial ended with {ended}: {last[0]}".rstrip(": ")


def _close_pipes(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _after_fork() -> None:
    global _LOCK  # noqa: PLW0603 - a thread of the parent may have held it
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
