"""One post of a torture: a process at work, its board, and what is done to it."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .board import Board, Field, Phase
from .roles import at_work

if TYPE_CHECKING:
    from .duty import Duty

STUCK_S = 30.0  # how long one operation may take on a machine that is too small for all this
_POLL_S = 0.01


class Post:
    """A process that is started again whenever it has ended.

    Parameters
    ----------
    name : str
    duty : Duty

    Attributes
    ----------
    kills, stops : int
    killed : bool
        Whether the process was killed, rather than ended by itself.
    resume_s : float
        When a process that was stopped is to go on; 0 where it is not stopped.
    code : int or None
        Exit code of the process; None while it runs.
    """

    def __init__(self, name: str, duty: Duty) -> None:
        self.name = name
        self.duty = duty
        self.board = Board(Path(duty.board), create=True)
        self.kills = self.stops = 0
        self.killed = False
        self.resume_s = 0.0
        self.code: int | None = 0
        self._pid = 0
        self._awake_ns = 0
        self._words = Path(duty.board).with_suffix(".stderr")

    @property
    def running(self) -> bool:
        """Whether the process is at work, past its start."""
        return self.poll() is None and self.board[Field.PHASE] == Phase.RUNNING

    def poll(self) -> int | None:
        """Return the exit code of the process; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def start(self, seed: int, *, afresh: bool) -> None:
        """Start a process.

        Parameters
        ----------
        seed : int
        afresh : bool
            With an interpreter of its own, under another hash seed; else as a fork of this one, which costs
            a tenth.
        """
        self.board.restart()
        self.duty = replace(self.duty, seed=seed)
        self.killed, self.resume_s = False, 0.0
        self._awake_ns = time.monotonic_ns()
        self._pid, self.code = os.fork(), None
        if self._pid == 0:
            self._become(afresh=afresh)

    def _become(self, *, afresh: bool) -> None:
        """Work at the post, and never return; in the child."""
        code = 1
        try:
            words = os.open(self._words, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(words, 2)
            os.close(words)
            if afresh:
                seed = str(self.duty.seed % (1 << 32))
                command = [sys.executable, "-m", f"{__package__}.roles", self.duty.dumps()]
                os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": seed})  # noqa: S606
            at_work(self.duty)
            code = 0
        finally:
            os._exit(code)

    def last_words(self) -> str:
        """Return the end of what the process has written to stderr."""
        return self._words.read_text(errors="replace")[-500:] if self._words.exists() else ""

    def kill(self) -> None:
        """Send SIGKILL, and see the process gone."""
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)
            self.kills += 1
            self.killed = True
            self.code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self.resume_s = 0.0

    def stop(self, seconds: float) -> None:
        """Send SIGSTOP; `wake` after so long."""
        if self.poll() is None and not self.resume_s:
            os.kill(self._pid, signal.SIGSTOP)
            self.resume_s = time.monotonic() + seconds
            self.stops += 1

    def wake(self, *, now: bool = False) -> None:
        """Let a stopped process go on where it is time."""
        if self.resume_s and (now or time.monotonic() >= self.resume_s):
            os.kill(self._pid, signal.SIGCONT)
            self.resume_s = 0.0
            self._awake_ns = time.monotonic_ns()

    def stuck(self) -> bool:
        """Whether the process has been awake in one operation for too long."""
        started_ns = self.board[Field.STARTED_NS]
        if not started_ns or self.resume_s:
            return False
        return time.monotonic_ns() - max(started_ns, self._awake_ns) > STUCK_S * 1e9

    def ask_to_end(self) -> None:
        """Ask for an orderly end."""
        self.board[Field.STOP] = 1

    def ended(self, until_s: float) -> bool:
        """Wait for an orderly end until a time on the monotonic clock."""
        while self.poll() is None and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return self.code == 0
