"""How many pages an import may add to a store without pushing any out."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from hicache_tier.errors import StoreError
from hicache_tier_storage.capacity import RootBudget, partition_paths
from hicache_tier_storage.partition import PartitionFacts
from hicache_tier_storage.slab import SlabShape
from hicache_tier_storage.table import table_nbytes

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_tier_storage import PageStore


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
    slab_nbytes = shape.file_nbytes + table_nbytes(shape.slots)
    own = stats["allocated_bytes"] // shape.file_nbytes * shape.slots - stats["pages"]
    used = RootBudget(store.root, store.capacity_nbytes).used_nbytes()
    left = min(store.capacity_nbytes - used, shutil.disk_usage(store.root).free)
    allowed = max(1, store.capacity_nbytes // shape.data_nbytes)
    slabs = min(max(0, left // slab_nbytes), max(0, allowed - stats["allocated_bytes"] // shape.file_nbytes))
    return int(max(0, own) + slabs * shape.slots)
