"""How many pages an import may add to a store without pushing any out."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from hicache_tier.errors import StoreError
from hicache_tier_storage.capacity import RootBudget, partition_paths
from hicache_tier_storage.census import SlotState, take_census
from hicache_tier_storage.liveness import live_writers
from hicache_tier_storage.partition_facts import PartitionFacts
from hicache_tier_storage.slab import SlabShape
from hicache_tier_storage.table import table_nbytes

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_tier_storage import PageStore
    from hicache_tier_storage.identity import Identity


def stated_capacity(root: Path) -> int | None:
    """Return the capacity that the partitions of a root state, the largest; None where there is none."""
    found = []
    for paths in partition_paths(root):
        try:
            found.append(PartitionFacts.read(paths).capacity_nbytes)
        except StoreError:
            continue
    return max(found, default=None)


def room_pages(store: PageStore) -> int:
    """Pages that a store takes before it must evict: free slots of its own partition, and slabs to come.

    What live writers take meanwhile is theirs; a put that then finds no room says so.
    """
    stats = store.stats()
    shape = SlabShape.choose(store.geometry.page_nbytes, store.capacity_nbytes)
    held = stats["allocated_bytes"] // shape.file_nbytes
    free = held * shape.slots - stats["pages"]
    left_nbytes = _left_nbytes(store.root, store.capacity_nbytes)
    return int(max(0, free) + _slabs_to_come(shape, store.capacity_nbytes, held, left_nbytes) * shape.slots)


class PretendedRoom:
    """The room that a dry run finds, less what the targets before would have taken of it.

    Parameters
    ----------
    root : Path
        Need not exist.
    capacity_nbytes : int
    """

    def __init__(self, root: Path, capacity_nbytes: int) -> None:
        self._root = root
        self._capacity_nbytes = capacity_nbytes
        self._left_nbytes = _left_nbytes(root, capacity_nbytes)

    def pages(self, identity: Identity) -> int:
        """Pages that a store of this identity would take, see `room_pages`."""
        shape = self._shape(identity)
        held, free = _first_idle(self._root, identity)
        slabs = _slabs_to_come(shape, self._capacity_nbytes, held, self._left_nbytes)
        return free + slabs * shape.slots

    def take(self, identity: Identity, pages: int) -> None:
        """Count pages as imported."""
        shape = self._shape(identity)
        fresh = max(0, pages - _first_idle(self._root, identity)[1])
        self._left_nbytes -= -(-fresh // shape.slots) * _slab_nbytes(shape)

    def _shape(self, identity: Identity) -> SlabShape:
        return SlabShape.choose(identity.geometry.page_nbytes, self._capacity_nbytes)


def _left_nbytes(root: Path, capacity_nbytes: int) -> int:
    """Bytes that slabs to come may take of a root and its disk."""
    existing = next(path for path in (root, *root.parents) if path.exists())
    used = RootBudget(root, capacity_nbytes).used_nbytes()
    return min(capacity_nbytes - used, shutil.disk_usage(existing).free)


def _slabs_to_come(shape: SlabShape, capacity_nbytes: int, held: int, left_nbytes: int) -> int:
    allowed = max(1, capacity_nbytes // shape.data_nbytes)
    return min(max(0, left_nbytes // _slab_nbytes(shape)), max(0, allowed - held))


def _slab_nbytes(shape: SlabShape) -> int:
    return shape.file_nbytes + table_nbytes(shape.slots)


def _first_idle(root: Path, identity: Identity) -> tuple[int, int]:
    """Slabs and free slots of the partition that a new writer would take."""
    beside = [
        paths
        for paths in partition_paths(root, identity.namespace)
        if paths.root.name == identity.pool and paths.root.parent.name.startswith(f"{identity.rank}-w")
    ]
    live = live_writers(root, beside)
    for paths in sorted(beside, key=lambda paths: int(paths.root.parent.name.rpartition("-w")[2])):
        if live[paths.root] is not False:
            continue
        try:
            facts = PartitionFacts.read(paths)
        except StoreError:
            return 0, 0
        found = [take_census(paths, facts, number) for number in paths.slab_numbers()]
        used = [len(census.records(SlotState.COMMITTED)[1]) for census in found if census is not None]
        return len(used), len(used) * facts.shape.slots - sum(used)
    return 0, 0
