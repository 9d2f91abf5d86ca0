"""What a stopped export has published of a part, so that the next one goes on from there."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np

from .documents import MAX_SHARD_PAGES, STATE, PartName, shard_name
from .rows import ROW

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .destination import Destination
    from .shard import Draft

_HEADER = struct.Struct("<8sQI")
_MAGIC = b"HCTROWS1"


class PublishedShards:
    """Rows of the shards of one part that are in place, kept beside the archive until it is finished.

    Parameters
    ----------
    destination : Destination
    part : PartName
    page_axes, capacity : int
        Axes of a page, and pages of a full shard where no earlier export has chosen another number.

    Attributes
    ----------
    capacity : int
        Pages of a full shard.
    counts : list of int
        Pages of the shards in place, by number.
    """

    def __init__(self, destination: Destination, part: PartName, page_axes: int, capacity: int) -> None:
        self._destination = destination
        self._part = part
        self._axes = page_axes
        self.capacity = self._agree(capacity)
        self._sizes = destination.sizes(f"{part.path}/pages")
        self.counts: list[int] = []

    def _agree(self, capacity: int) -> int:
        """Write down the pages of a full shard, or return what is written down."""
        name = f"{STATE}/{self._part.path}/shard_pages"
        told = self._destination.get(name)
        if told is not None and told.isdigit() and 0 < int(told) <= MAX_SHARD_PAGES:
            return int(told)
        self._destination.put(name, str(capacity).encode())
        return capacity

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all shards in place."""
        return sum(self._sizes[shard_name(number, self._axes)] for number in range(len(self.counts)))

    def shard(self, number: int) -> str:
        """File of a shard."""
        return f"{self._part.path}/pages/{shard_name(number, self._axes)}"

    def rows_file(self, number: int) -> str:
        """File with the rows of a shard."""
        return f"{STATE}/{self._part.path}/{number}.rows"

    def publish(self, draft: Draft, *, sync: bool) -> None:
        """Seal a draft and make it the next shard, its rows first."""
        number = len(self.counts)
        draft.seal(sync=sync)
        raw = draft.rows.tobytes()
        header = _HEADER.pack(_MAGIC, draft.file_nbytes, google_crc32c.value(raw))
        self._destination.put(self.rows_file(number), header + raw)
        self._destination.publish(Path(draft.path), self.shard(number))
        self._sizes[shard_name(number, self._axes)] = draft.file_nbytes
        self.counts.append(len(draft))

    def rows(self, number: int) -> NDArray[np.void] | None:
        """Return the rows of a published shard, or None where they do not go with its file."""
        raw = self._destination.get(self.rows_file(number))
        if raw is None or len(raw) < _HEADER.size or (len(raw) - _HEADER.size) % ROW.itemsize:
            return None
        magic, nbytes, crc = _HEADER.unpack_from(raw)
        body = raw[_HEADER.size :]
        if magic != _MAGIC or crc != google_crc32c.value(body):
            return None
        if self._sizes.get(shard_name(number, self._axes)) != nbytes:
            return None
        return np.frombuffer(body, ROW)

    def resume(self) -> list[NDArray[np.void]]:
        """Return the rows of the full shards 0, 1, ... that are in place; remove all that came after."""
        found: list[NDArray[np.void]] = []
        while (rows := self.rows(len(found))) is not None and len(rows) == self.capacity:
            found.append(rows)
        self.counts = [len(rows) for rows in found]
        keep = {shard_name(number, self._axes) for number in range(len(found))}
        stale = [f"{self._part.path}/pages/{name}" for name in self._sizes if name not in keep]
        self._destination.remove(stale)
        return found
