"""Shard files of an archive: coded pages one after another, then the index that Zarr wants."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import google_crc32c
import numpy as np

from .rows import ROW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MISSING: Final = 0xFFFF_FFFF_FFFF_FFFF
_VECTORS = 512  # fewer than IOV_MAX


def index_nbytes(capacity: int) -> int:
    """Bytes of a shard's index and its CRC."""
    return 16 * capacity + 4


def pack_index(offsets: NDArray[np.uint64], nbytes: NDArray[np.uint64], capacity: int) -> bytes:
    """Offset and length of every inner chunk of a shard, and the CRC32C; chunks there are not say so."""
    pairs = np.full((capacity, 2), MISSING, "<u8")
    pairs[: len(offsets), 0] = offsets
    pairs[: len(offsets), 1] = nbytes
    raw = pairs.tobytes()
    return raw + int(google_crc32c.value(raw)).to_bytes(4, "little")


@dataclass(slots=True)
class Draft:
    """A shard that is being filled: its file so far, and what lies in it.

    Plain data, so that one process goes on with what another began.

    Attributes
    ----------
    path : str
        File of its own, outside the archive proper.
    capacity : int
        Pages of a full shard.
    rows : structured [n]
        What the archive knows of each page, in shard order.
    lengths : uint64 [n]
        Coded bytes of each.
    """

    path: str
    capacity: int
    rows: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, ROW))
    lengths: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def room(self) -> int:
        """Pages that still fit."""
        return self.capacity - len(self.rows)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the coded pages."""
        return int(self.lengths.sum())

    @property
    def file_nbytes(self) -> int:
        """Bytes of the sealed file."""
        return self.payload_nbytes + index_nbytes(self.capacity)

    def extend(self, rows: NDArray[np.void], lengths: Sequence[int]) -> None:
        """Enter pages whose bytes were written."""
        self.rows = np.concatenate([self.rows, rows])
        self.lengths = np.concatenate([self.lengths, np.array(lengths, np.uint64)])

    def seal(self, *, sync: bool) -> None:
        """Write the index behind the pages."""
        ends = np.cumsum(self.lengths)
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            at = self.payload_nbytes
            os.ftruncate(fd, at)
            write_all(fd, [pack_index(ends - self.lengths, self.lengths, self.capacity)], at)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def take_from(self, other: Draft) -> None:
        """Move pages from the end of another draft to this one, as many as fit."""
        count = min(self.room, len(other))
        if not count:
            return
        first = len(other) - count
        at, wanted = int(other.lengths[:first].sum()), int(other.lengths[first:].sum())
        with open(other.path, "r+b") as source, open(self.path, "r+b") as target:  # noqa: PTH123 - speed
            copy_range(source.fileno(), at, target.fileno(), self.payload_nbytes, wanted)
            source.truncate(at)
        self.extend(other.rows[first:], other.lengths[first:].tolist())
        other.rows, other.lengths = other.rows[:first], other.lengths[:first]


def merged(drafts: Sequence[Draft]) -> list[Draft]:
    """Move pages between drafts so that only the last has room; return those that hold any."""
    rest = sorted((draft for draft in drafts if len(draft)), key=len)
    found = []
    while rest:
        first = rest.pop()
        while rest and first.room:
            first.take_from(rest[0])
            if not len(rest[0]):
                rest.pop(0)
        found.append(first)
    return found


def write_all(fd: int, parts: list[Any], offset: int) -> int:
    """Write buffers one after another at an offset, whatever one call takes; return the bytes written."""
    views = [memoryview(part).cast("B") for part in parts]
    start = offset
    while views:
        done = os.pwritev(fd, views[:_VECTORS], offset)
        offset += done
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if views and done:
            views[0] = views[0][done:]
    return offset - start


def copy_range(source: int, source_at: int, target: int, target_at: int, nbytes: int) -> None:
    """Copy bytes between files."""
    step = 4 << 20
    while nbytes:
        part = os.pread(source, min(step, nbytes), source_at)
        if not part:
            raise OSError(0, f"a file ended {nbytes} bytes early")
        write_all(target, [part], target_at)
        source_at, target_at, nbytes = source_at + len(part), target_at + len(part), nbytes - len(part)
