"""What a process at work tells whoever started it, in shared memory that outlives it."""

from __future__ import annotations

import time
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

_NBYTES = 4096
_NAME_AT = 2048


class Phase(IntEnum):
    """How far a process is."""

    STARTING = 0
    VERIFYING = 1
    RUNNING = 2
    ENDED = 3


class Field(IntEnum):
    """Words of a board. Those from `READS` on are counted over all processes that used it."""

    PHASE = 0
    STOP = 1  # asks for an orderly end
    OPERATION = 2  # how many were begun
    STARTED_NS = 3  # when the one under way was, on the monotonic clock; 0 between two
    SLOWEST_NS = 4
    READS = 5
    WRONG = 6
    STORED = 7
    REFUSED = 8
    MISSED = 9
    VERIFIED = 10
    MISSING = 11
    ERRORS = 12
    LEAKS = 13
    EXPORTS = 14
    FOREIGN_WRITES = 15
    LATE = 16  # pages of calls that missed their deadline, and clears


COUNTED = tuple(field for field in Field if field >= Field.READS)


class Board:
    """Words that one process writes and another reads.

    Parameters
    ----------
    path : Path
        A file, in memory best.
    create : bool
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        raw = np.memmap(path, np.uint8, "w+" if create else "r+", shape=_NBYTES)
        self._words = raw[:_NAME_AT].view(np.int64)
        self._name = raw[_NAME_AT : _NAME_AT + 32].data

    def __getitem__(self, field: Field) -> int:
        return int(self._words[field])

    def __setitem__(self, field: Field, value: int) -> None:
        self._words[field] = value

    def add(self, field: Field, count: int) -> None:
        """Count."""
        self._words[field] += count

    def begin(self) -> None:
        """Note that an operation begins."""
        self._words[Field.OPERATION] += 1
        self._words[Field.STARTED_NS] = time.monotonic_ns()

    def end(self, name: str) -> None:
        """Note that it has ended, and what it was."""
        took_ns = time.monotonic_ns() - self[Field.STARTED_NS]
        self._words[Field.STARTED_NS] = 0
        if took_ns > self[Field.SLOWEST_NS]:
            self._words[Field.SLOWEST_NS] = took_ns
            self._name[:] = name.encode().ljust(len(self._name))[: len(self._name)]

    @property
    def slowest(self) -> tuple[float, str]:
        """Seconds that the slowest operation took, time that its process stood still included; its name."""
        return self[Field.SLOWEST_NS] / 1e9, bytes(self._name).decode().strip()

    def restart(self) -> None:
        """Make ready for the next process: what is counted stays."""
        for field in (Field.PHASE, Field.STOP, Field.STARTED_NS):
            self._words[field] = 0
