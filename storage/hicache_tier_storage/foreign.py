"""Pages of other writers of the same rank, found and followed without asking them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_tier.errors import StoreError

from .capacity import PARTITION_NAME, partition_paths
from .partition import Pages, ReaderPartition

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hicache_tier.geometry import KVGeometry

    from .partition import PartitionPaths
    from .slab import FileCache

_POLL_S = 0.02
_RESCAN_S = 0.05  # how often partitions without a journal are compared


class ForeignPages:
    """Index over the partitions of one rank and pool that other processes write, or wrote.

    Not thread-safe: `PageStore` calls it under its lock; `index` may be read without it.

    Attributes
    ----------
    index : dict
        Key to `(partition, slot)`.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        *,
        rank: str | None,
        pool: str,
        own: PartitionPaths | None,
        geometry: KVGeometry | None,
        cache: FileCache,
        boot: bytes,
    ) -> None:
        self.index: dict[bytes, tuple[ReaderPartition, int]] = {}
        self.partitions: dict[Path, ReaderPartition] = {}
        self._root, self._namespace = root, namespace
        self._rank, self._pool, self._own = rank, pool, own
        self._geometry, self._cache, self._boot = geometry, cache, boot
        self._listed = (-1, 0)
        self._next_poll = 0.0
        self._next_scan = 0.0
        self._pending = False
        self.refused: dict[Path, str] = {}

    def due(self) -> bool:
        """Whether it is time to look again; cheap, may be called without the lock."""
        return time.monotonic() >= self._next_poll

    def refresh(self) -> None:
        """Look for new partitions and follow the known ones."""
        now = time.monotonic()
        self._next_poll = now + _POLL_S
        scan = now >= self._next_scan
        if scan:
            self._next_scan = now + _RESCAN_S
        self._discover(force=scan)
        for path, partition in list(self.partitions.items()):
            if not partition.followed and not scan:
                continue
            if scan and not partition.paths.lock.exists():
                self._forget(path)
                continue
            for change in partition.changes():
                if isinstance(change, Pages):
                    self._hold(partition, change)
                else:
                    self.lose(partition, change)

    def _discover(self, *, force: bool) -> None:
        space = self._root / self._namespace
        try:
            stat = space.stat()
        except FileNotFoundError:
            return
        listed = (stat.st_mtime_ns, stat.st_ino)
        if listed == self._listed and not (force and self._pending):
            return
        self._listed = listed
        self._pending = False
        for paths in partition_paths(self._root, self._namespace):
            if paths == self._own or paths.root in self.partitions or paths.root.name != self._pool:
                continue
            match = PARTITION_NAME.fullmatch(paths.root.parent.name)
            if match is None or self._rank not in {None, match[1]}:
                continue
            try:
                partition = ReaderPartition(paths, self._cache, boot=self._boot, expected=self._geometry)
            except (StoreError, OSError) as error:
                self._pending = True  # perhaps still being created
                self.refused[paths.root] = str(error)
                continue
            self.refused.pop(paths.root, None)
            self.partitions[paths.root] = partition
            self._pending = True  # pools of a new rank folder may still appear

    def _hold(self, partition: ReaderPartition, pages: Pages) -> None:
        index, held = self.index, partition.held
        for slot, key in zip(pages.slots.tolist(), pages.keys, strict=True):
            old = held.get(slot)
            if old is not None and old != key:
                self._unlist(partition, slot, old)
            held[slot] = key
            index[key] = (partition, slot)

    def lose(self, partition: ReaderPartition, slots: NDArray[np.int64]) -> None:
        """Forget pages that are gone."""
        for slot in slots.tolist():
            key = partition.held.pop(slot, None)
            if key is not None:
                self._unlist(partition, slot, key)

    def lose_pages(self, partition: ReaderPartition, pages: Sequence[tuple[int, bytes]]) -> None:
        """Forget pages (slot, key) that turned out damaged, unless the slot holds another one by now."""
        for slot, key in pages:
            if partition.held.get(slot) == key:
                del partition.held[slot]
                self._unlist(partition, slot, key)

    def _unlist(self, partition: ReaderPartition, slot: int, key: bytes) -> None:
        if self.index.get(key) == (partition, slot):
            del self.index[key]

    def lose_slabs(self, partition: ReaderPartition, damage: dict[int, str]) -> None:
        """Drop slabs of a partition; say so where they are damaged, not where the store gave them up."""
        for number, why in damage.items():
            if partition.paths.table(number).exists():
                partition.report(why)
            self.lose(partition, partition.lose_slab(number))

    def _forget(self, path: Path) -> None:
        partition = self.partitions.pop(path)
        for slot, key in partition.held.items():
            self._unlist(partition, slot, key)
        partition.close()

    def close(self) -> None:
        """Unmap everything."""
        self.index.clear()
        for partition in self.partitions.values():
            partition.close()
        self.partitions.clear()
