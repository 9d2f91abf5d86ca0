"""Where pages that are to be read lie."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    from .core import StoreCore
    from .partition import Partition
    from .reader_partition import ReaderPartition

    Place: TypeAlias = tuple[Partition, NDArray[np.int64], NDArray[np.int64]]  # rows of a request, slots

_NOT_OURS = -1


class Finder:
    """Looks pages up, by partition; those of this process's own are pinned until they are read.

    Parameters
    ----------
    core : StoreCore
    """

    def __init__(self, core: StoreCore) -> None:
        self._core = core

    def find(self, keys: list[bytes]) -> list[Place]:
        """Look pages up, by partition; those of this process's own are pinned until they are read."""
        core = self._core
        with core.lock:
            own = np.array(list(map(core.index.get, keys, repeat(_NOT_OURS))), np.int64)
            theirs: dict[ReaderPartition, tuple[list[int], list[int]]] = {}
            foreign = core.foreign.index
            for row in np.flatnonzero(own == _NOT_OURS).tolist() if foreign else []:
                place = foreign.get(keys[row])
                if place is not None:
                    rows, slots = theirs.setdefault(place[0], ([], []))
                    rows.append(row)
                    slots.append(place[1])
            mine = np.flatnonzero(own != _NOT_OURS)
            return self._places(theirs, mine, own[mine])

    def find_again(
        self, keys: list[bytes], missed: list[int], tried: set[tuple[int, Partition, int]]
    ) -> list[Place]:
        """Look pages up at places that were not tried; as `find`."""
        core = self._core
        mine: list[int] = []
        own: list[int] = []
        theirs: dict[ReaderPartition, tuple[list[int], list[int]]] = {}
        with core.lock:
            for row in missed:
                slot = core.index.get(keys[row])
                if slot is not None and core.writer is not None and (row, core.writer, slot) not in tried:
                    mine.append(row)
                    own.append(slot)
                    continue
                for partition, at in core.foreign.places(keys[row]):
                    if (row, partition, at) not in tried:
                        rows, slots = theirs.setdefault(partition, ([], []))
                        rows.append(row)
                        slots.append(at)
                        break
            return self._places(theirs, np.array(mine, np.int64), np.array(own, np.int64))

    def _places(
        self,
        theirs: dict[ReaderPartition, tuple[list[int], list[int]]],
        mine: NDArray[np.int64],
        own: NDArray[np.int64],
    ) -> list[Place]:
        """Pin this process's own pages (rows `mine`, slots `own`). The lock must be held."""
        core = self._core
        found: list[Place] = [
            (partition, np.array(rows, np.int64), np.array(slots, np.int64))
            for partition, (rows, slots) in theirs.items()
        ]
        if core.writer is not None and len(mine):
            core.touch(own)
            found.append((core.writer, mine, own))
            core.writer.hold(own)
        return found
