"""Change journal of a partition: which slots changed, in order, for other processes to follow.

It is a hint, never trusted: a reader re-reads the slot record of every slot it names. A reader without it, or
one that fell behind by more than half a ring, scans the slot tables instead. `state/journal`: 0 `HCTJRNL1`;
8 u64 slots appended so far; 4096 a ring of u32 slot numbers.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MAGIC = b"HCTJRNL1"
_RING = 1 << 16
_NBYTES = 4096 + 4 * _RING
_BEHIND = _RING // 2  # readers further behind than this scan instead


class Journal:
    """Memory-mapped ring of slot numbers, one writer and any number of readers.

    Its file is looked at before the map is touched: a file that was cut would be fatal.
    """

    def __init__(self, path: Path, *, writable: bool) -> None:
        flags = (os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)
        try:
            if writable and not (self._whole() and os.pread(self._fd, 8, 0) == _MAGIC):
                self._make()
            if not self._whole() or os.pread(self._fd, 8, 0) != _MAGIC:
                raise OSError(f"{path} is not a journal of this version")  # noqa: TRY301
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(self._fd, _NBYTES, access=access)
        except BaseException:
            os.close(self._fd)
            raise
        self._words = np.frombuffer(self._map, np.uint64, count=2)
        self._ring = np.frombuffer(self._map, np.uint32, offset=4096)
        self._cursor = int(self._words[1])

    def _whole(self) -> bool:
        return os.fstat(self._fd).st_size == _NBYTES

    def _make(self) -> None:
        os.posix_fallocate(self._fd, 0, _NBYTES)
        os.ftruncate(self._fd, _NBYTES)
        os.pwrite(self._fd, _MAGIC, 0)

    def append(self, slots: NDArray[np.int64]) -> None:
        """Tell that these slots changed."""
        if len(slots) > _BEHIND or not self._whole():
            self.invalidate()
            return
        # The writer counts for itself: what the file says may be garbage by now.
        self._ring[(self._cursor % _RING + np.arange(len(slots))) % _RING] = slots
        self._count_on(len(slots))

    def _count_on(self, count: int) -> None:
        self._cursor = (self._cursor + count) % (1 << 64)
        self._words[1] = self._cursor

    def invalidate(self) -> None:
        """Make every reader scan the tables."""
        if not self._whole():
            with suppress(OSError):  # a hint; readers scan without it
                self._make()
            if not self._whole():
                return
        self._count_on(_RING + 1)

    def changes(self) -> NDArray[np.int64] | None:
        """Return slots changed since the last call, each once; None where only a scan can tell.

        Raises
        ------
        OSError
            Where the file was cut.
        """
        if not self._whole():
            raise OSError("the journal was cut")
        head = int(self._words[1])
        count = (head - self._cursor) % (1 << 64)
        if count == 0:
            return np.empty(0, np.int64)
        at = (self._cursor % _RING + np.arange(min(count, _BEHIND))) % _RING
        slots = self._ring[at]
        # The writer fills the ring before it counts, at most `_BEHIND` slots at once.
        lost = count > _BEHIND or (int(self._words[1]) - self._cursor) % (1 << 64) > _BEHIND
        self._cursor = head
        return None if lost else np.unique(slots).astype(np.int64)

    def close(self) -> None:
        """Unmap."""
        del self._words, self._ring
        self._map.close()
        os.close(self._fd)
