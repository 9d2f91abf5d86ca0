"""Change journal of a partition: which slots changed, in order, for other processes to follow.

It is a hint, never trusted: a reader re-reads the slot record of every slot it names. A reader without it, or
one that fell behind by more than a ring, scans the slot tables instead. `state/journal`: 0 `HCTJRNL1`;
8 u64 slots appended so far; 4096 a ring of u32 slot numbers.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MAGIC = b"HCTJRNL1"
_RING = 1 << 16
_NBYTES = 4096 + 4 * _RING


class Journal:
    """Memory-mapped ring of slot numbers, one writer and any number of readers."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        flags = (os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            if writable and os.fstat(fd).st_size != _NBYTES:
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, _NBYTES)
                os.pwrite(fd, _MAGIC, 0)
            if os.fstat(fd).st_size != _NBYTES or os.pread(fd, 8, 0) != _MAGIC:
                raise OSError(f"{path} is not a journal of this version")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(fd, _NBYTES, access=access)
        finally:
            os.close(fd)
        self._words = np.frombuffer(self._map, np.uint64, count=2)
        self._ring = np.frombuffer(self._map, np.uint32, offset=4096)
        self._cursor = int(self._words[1])

    def append(self, slots: NDArray[np.int64]) -> None:
        """Tell that these slots changed."""
        head = int(self._words[1])
        recent = slots[-_RING:]
        at = (head + len(slots) - len(recent) + np.arange(len(recent))) % _RING
        self._ring[at] = recent
        self._words[1] = head + len(slots)

    def invalidate(self) -> None:
        """Make every reader scan the tables."""
        self._words[1] += np.uint64(_RING + 1)

    def changes(self) -> NDArray[np.int64] | None:
        """Return slots changed since the last call, each once; None where only a scan can tell."""
        head = int(self._words[1])
        count = head - self._cursor
        if count == 0:
            return np.empty(0, np.int64)
        at = (self._cursor + np.arange(min(count, _RING))) % _RING
        slots = self._ring[at]
        lost = count > _RING or int(self._words[1]) - self._cursor > _RING
        self._cursor = head
        return None if lost else np.unique(slots).astype(np.int64)

    def close(self) -> None:
        """Unmap."""
        del self._words, self._ring
        self._map.close()
