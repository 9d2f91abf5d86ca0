"""How a writer's partition grows and shrinks, a slab at a time, within the root's cap."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import numpy as np

from .metadata import replace_file
from .partition import remove_slab
from .slab import SlabDamagedError, create_slab
from .table import table_nbytes

if TYPE_CHECKING:
    from .capacity import RootBudget
    from .writer import WriterPartition

_RETRY_S = 1.0


class Growth:
    """Slabs of one partition, against the cap of its root."""

    def __init__(self, partition: WriterPartition, budget: RootBudget) -> None:
        self._partition = partition
        self._budget = budget
        self._not_before = 0.0

    def grow(self) -> bool:
        """Add a slab where the cap and the disk allow it; else say why in `partition.no_room`.

        A refusal is not asked for again within a second; live writers above their fair share are asked to
        give up a slab meanwhile.
        """
        partition, shape = self._partition, self._partition.facts.shape
        if (len(partition.slabs) + 1) * shape.slots > partition.capacity:
            partition.no_room = "capacity"
            return False
        if time.monotonic() < self._not_before:
            return False
        try:
            with self._budget.lock():
                nbytes = shape.file_nbytes + table_nbytes(shape.slots)
                why = self._budget.room_for(nbytes, partition.paths)
                if not why:
                    number = self._vacant_number()
                    if number is not None:
                        self._add_slab(number)
                        return True
                    why = "capacity"
                elif why == "capacity":
                    self._budget.ask_for_room()
        except SlabDamagedError as error:
            why = f"io_error: {error}"
        except OSError as error:
            full_disk = error.errno in {errno.ENOSPC, errno.EDQUOT}
            why = "disk_full" if full_disk else f"io_error: {error.strerror}"
        partition.no_room = why
        self._not_before = time.monotonic() + _RETRY_S
        return False

    def _vacant_number(self) -> int | None:
        """Return a slab number that no I/O is under way in: a dropped slab's I/O may still be."""
        partition, size = self._partition, self._partition.facts.shape.slots
        for number in range(partition.capacity // size):
            if (
                number not in partition.slabs
                and not partition.pins[number * size : (number + 1) * size].any()
            ):
                return number
        return None

    def _add_slab(self, number: int) -> None:
        partition, shape = self._partition, self._partition.facts.shape
        table = partition.paths.table(number)
        slab = partition.paths.slab(number, partition.facts.page_axes)
        replace_file(table, bytes(table_nbytes(shape.slots)))
        try:
            create_slab(slab, shape)
            partition.map_slab(number)
        except BaseException:
            remove_slab(slab, table)
            raise
        partition.add_slab(number)

    def shed(self) -> tuple[bool, list[tuple[int, bytes]], list[bytes]]:
        """Give up the last slab that no I/O is in flight in, keeping the most recent pages.

        Returns
        -------
        (shed, moved, lost)
            Whether a slab was given up; pages that lie in another slot now (slot, key); keys evicted.
        """
        partition = self._partition
        size = partition.facts.shape.slots
        idle = [n for n in partition.slabs if not partition.pins[n * size : (n + 1) * size].any()]
        if len(partition.slabs) <= 1 or not idle:
            return False, [], []
        busy = sum(slot not in partition.keys for slot in np.flatnonzero(partition.pins).tolist())
        surplus = len(partition.keys) + busy - (len(partition.slabs) - 1) * size
        lost: list[bytes] = []
        if surplus > 0:
            victims, lost = partition.evict(surplus)
            partition.give_back(victims)
        number = next((n for n in sorted(idle, reverse=True) if self._has_room_elsewhere(n)), None)
        if number is None:
            return False, [], lost
        mine = [slot for slot in range(number * size, (number + 1) * size) if slot in partition.keys]
        moved: list[tuple[int, bytes]] = []
        for slot in sorted(mine, key=lambda slot: not partition.pinned[slot]):
            key = partition.keys[slot]
            target = partition.take_free(outside=number)
            if target is not None and partition.move(slot, target):
                moved.append((target, key))
        dropped = partition.drop_slab(number, "")
        partition.evictions += len(dropped)
        return True, moved, lost + dropped

    def _has_room_elsewhere(self, number: int) -> bool:
        """Whether the pinned pages of a slab can be moved to others."""
        partition, size = self._partition, self._partition.facts.shape.slots
        pinned = int(partition.pinned[number * size : (number + 1) * size].sum())
        return not pinned or pinned <= partition.free_outside(number)
