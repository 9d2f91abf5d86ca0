"""How a writer's partition grows and shrinks, a slab at a time, within the root's cap."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import numpy as np

from .capacity import GROW_PATIENCE_S
from .inside import ARRAY_FILE
from .locks import RootBusyError
from .metadata import replace_file, temporary_name
from .partition_files import remove_slab
from .slab import SlabDamagedError, create_slab
from .table import table_nbytes

if TYPE_CHECKING:
    from .capacity import RootBudget
    from .writer import WriterPartition

_RETRY_S = 1.0
_ASK_AGAIN_S = 0.25  # while others have been asked to give up a slab
_BUSY_PATIENCE_S = 0.1  # for the root's lock, once it was not to be had


class Growth:
    """Slabs of one partition, against the cap of its root."""

    def __init__(self, partition: WriterPartition, budget: RootBudget) -> None:
        self._partition = partition
        self._budget = budget
        self._not_before = 0.0
        self._patience_s = GROW_PATIENCE_S

    def grow(self) -> bool:
        """Add a slab where the cap and the disk allow it; else say why in `partition.no_room`.

        After a refusal it is a second until it is tried again, less where live writers above their fair
        share have been asked to give up a slab. The root's lock is waited for two seconds at most.
        """
        partition, shape, budget = self._partition, self._partition.facts.shape, self._budget
        allowed = max(1, budget.capacity_nbytes // (shape.slots * shape.stride))
        if len(partition.slabs) >= allowed:
            partition.no_room = "capacity"
            return False
        if partition.is_gone:
            partition.no_room = "store_gone"
            return False
        if time.monotonic() < self._not_before:
            return False
        retry_s = _RETRY_S
        try:
            with budget.lock(self._patience_s):
                self._patience_s = GROW_PATIENCE_S
                why, retry_s = self._take_slab(shape.file_nbytes + table_nbytes(shape.slots))
        except RootBusyError as error:
            why = error.kind
            self._patience_s = _BUSY_PATIENCE_S
        except SlabDamagedError as error:
            why = f"io_error: {error}"
        except OSError as error:
            full_disk = error.errno in {errno.ENOSPC, errno.EDQUOT}
            why = "disk_full" if full_disk else f"io_error: {error.strerror}"
        if not why:
            return True
        partition.no_room = why
        self._not_before = time.monotonic() + retry_s
        return False

    def _take_slab(self, nbytes: int) -> tuple[str, float]:
        """Add a slab, under the root's lock; return "" or why not, and seconds until the next try."""
        budget, paths = self._budget, self._partition.paths
        why = "capacity" if budget.must_wait(paths) else budget.room_for(nbytes, paths)
        if why == "capacity":
            asked = budget.ask_for_room(nbytes, paths)
            return why + self._too_many_writers(nbytes), _ASK_AGAIN_S if asked else _RETRY_S
        number = None if why else self._vacant_number()
        if number is None:
            return why or "capacity", _RETRY_S
        self._add_slab(number)
        return "", 0.0

    def _too_many_writers(self, nbytes: int) -> str:
        """Say so where this writer has no slab and the cap holds fewer than there are writers."""
        if self._partition.slabs:
            return ""
        cap_nbytes, writers = self._budget.capacity_nbytes, self._budget.live_writers(self._partition.paths)
        fits = cap_nbytes // nbytes
        if writers <= fits:
            return ""
        self._partition.tell(
            f"capacity_bytes={cap_nbytes} is {fits} slabs of {nbytes} bytes, shared by {writers} writers "
            f"(ranks and pools), of which this one has none; at least {writers * nbytes} give each one a slab"
        )
        return f": {fits} slabs for {writers} writers"

    def _vacant_number(self) -> int | None:
        """Return a slab number whose names are free and that no I/O of a dropped slab is under way in."""
        partition, size = self._partition, self._partition.facts.shape.slots
        for number in range(partition.capacity // size):
            if (
                number not in partition.slabs
                and not partition.pins[number * size : (number + 1) * size].any()
                and not self._is_blocked(number)
            ):
                return number
        return None

    def _is_blocked(self, number: int) -> bool:
        """Whether somebody's directory bears a name of this slab."""
        paths = self._partition.paths
        names = (paths.slab(number, self._partition.facts.page_axes), paths.table(number))
        both = (path for name in names for path in (name, temporary_name(name)))
        folder = next((path for path in both if path.is_dir() and not path.is_symlink()), None)
        if folder is not None:
            self._partition.tell(f"{folder.name} is a directory: slab {number} cannot be made")
        return folder is not None

    def _add_slab(self, number: int) -> None:
        partition, shape = self._partition, self._partition.facts.shape
        table = partition.paths.table(number)
        slab = partition.paths.slab(number, partition.facts.page_axes)
        access = self._budget.access
        replace_file(table, bytes(table_nbytes(shape.slots)), ARRAY_FILE, access)
        try:
            create_slab(slab, shape, ARRAY_FILE, access)
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
