"""Change journal of a partition: which slots changed, in order, for other processes to follow.

It is a hint, never trusted: a reader re-reads the slot record of every slot it names. A reader without it, or
one that fell behind by more than half a ring, scans the slot tables instead. `state/journal`: 0 `HCTJRNL1`;
8 u64 slots appended so far; 4096 a ring of u32 slot numbers.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from .access import Access
from .inside import ARRAY_FILE, open_inside

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MAGIC = b"HCTJRNL1"
_RING = 1 << 16
_RING_AT = 4096
_NBYTES = _RING_AT + 4 * _RING
_BEHIND = _RING // 2  # readers further behind than this scan instead


class Journal:
    """Ring of slot numbers, one writer and any number of readers.

    Read and written by calls, not through a map: another program that cuts the file costs a hint, no process.

    Parameters
    ----------
    path : Path
    writable : bool
        Make the file where there is none.
    access : Access
        Of a file that is made.

    Raises
    ------
    OSError
        Where it cannot be opened, or is no journal.
    """

    def __init__(self, path: Path, *, writable: bool, access: Access = Access.PRIVATE) -> None:
        flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        self._fd = open_inside(path, ARRAY_FILE, flags, access.file_mode)
        try:
            if writable and not (self._whole() and os.pread(self._fd, 8, 0) == _MAGIC):
                self._make()
                access.settle(self._fd)
            if not self._whole() or os.pread(self._fd, 8, 0) != _MAGIC:
                raise OSError(f"{path} is not a journal of this version")  # noqa: TRY301
            self._cursor = self._count()
        except BaseException:
            os.close(self._fd)
            raise

    def _whole(self) -> bool:
        return os.fstat(self._fd).st_size == _NBYTES

    def _make(self) -> None:
        os.posix_fallocate(self._fd, 0, _NBYTES)
        os.ftruncate(self._fd, _NBYTES)
        os.pwrite(self._fd, _MAGIC, 0)

    def _count(self) -> int:
        return int.from_bytes(self._read(8, 8), "little")

    def _read(self, nbytes: int, at: int) -> bytes:
        raw = os.pread(self._fd, nbytes, at)
        if len(raw) != nbytes:
            raise OSError("the journal was cut")
        return raw

    # -- the writer's side: a hint that cannot be written is no fault ------------------------------------

    def append(self, slots: NDArray[np.int64]) -> None:
        """Tell that these slots changed."""
        try:
            told = len(slots) <= _BEHIND and self._whole() and self._fill(slots.astype("<u4").tobytes())
        except OSError:
            told = False
        if told:
            self._count_on(len(slots))
        else:
            self.invalidate()

    def _fill(self, raw: bytes) -> bool:
        # The writer counts for itself: what the file says may be garbage by now.
        at = 4 * (self._cursor % _RING)
        fits = 4 * _RING - at
        done = os.pwrite(self._fd, raw[:fits], _RING_AT + at)
        if len(raw) > fits:
            done += os.pwrite(self._fd, raw[fits:], _RING_AT)
        return done == len(raw)

    def _count_on(self, count: int) -> None:
        self._cursor = (self._cursor + count) % (1 << 64)
        with suppress(OSError):
            os.pwrite(self._fd, self._cursor.to_bytes(8, "little"), 8)

    def invalidate(self) -> None:
        """Make every reader scan the tables."""
        with suppress(OSError):
            if not self._whole():
                self._make()
        self._count_on(_RING + 1)

    # -- the reader's side -------------------------------------------------------------------------------

    def changes(self) -> NDArray[np.int64] | None:
        """Return slots changed since the last call, each once; None where only a scan can tell.

        Raises
        ------
        OSError
            Where the file was cut, or is not the one that a writer would open any more.
        """
        stat = os.fstat(self._fd)
        if stat.st_size != _NBYTES or not stat.st_nlink:
            raise OSError("the journal was cut or replaced")
        head = self._count()
        count = (head - self._cursor) % (1 << 64)
        if count == 0:
            return np.empty(0, np.int64)
        lost = count > _BEHIND
        raw = b"" if lost else self._ring(self._cursor % _RING, count)
        # The writer fills the ring before it counts, at most `_BEHIND` slots at once.
        lost = lost or (self._count() - self._cursor) % (1 << 64) > _BEHIND
        self._cursor = head
        return None if lost else np.unique(np.frombuffer(raw, "<u4")).astype(np.int64)

    def _ring(self, first: int, count: int) -> bytes:
        before_end = min(count, _RING - first)
        raw = self._read(4 * before_end, _RING_AT + 4 * first)
        return raw + self._read(4 * (count - before_end), _RING_AT) if count > before_end else raw

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
