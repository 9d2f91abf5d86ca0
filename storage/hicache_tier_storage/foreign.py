"""Pages of other writers of the same rank, found and followed without asking them."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from hicache_tier.errors import StoreError

from .access import Owners
from .capacity import PARTITION_NAME, partition_paths
from .partition import Pages
from .reader_partition import ReaderPartition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hicache_tier.geometry import KVGeometry

    from .encryption import EncryptionKey
    from .partition_files import PartitionPaths
    from .slab import FileCache

_POLL_S = 0.02
_RESCAN_S = 0.05  # how often partitions without a journal are compared
_LISTING_S = 1.0  # how often folders are listed whose times have not changed
_LOG = logging.getLogger(__name__)


class ForeignPages:
    """Index over the partitions of one rank and pool that other processes write, or wrote.

    Not thread-safe: `PageStore` calls it under its lock; `index` may be read without it.

    Attributes
    ----------
    index : dict
        Key to `(partition, slot)`; of a page that several writers hold, one of the places.
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
        owners: Owners = Owners.ANY,
        key: EncryptionKey | None = None,
    ) -> None:
        self.index: dict[bytes, tuple[ReaderPartition, int]] = {}
        self.partitions: dict[Path, ReaderPartition] = {}
        self._root, self._namespace = root, namespace
        self._rank, self._pool, self._own = rank, pool, own
        self._geometry, self._cache, self._boot, self._owners = geometry, cache, boot, owners
        self._key = key
        self._copies: dict[bytes, set[tuple[ReaderPartition, int]]] = {}  # places that `index` does not name
        self._listed: tuple[tuple[str, int, int], ...] = ()
        self._failing: set[Path] = set()
        self._next_poll = 0.0
        self._next_scan = 0.0
        self._next_listing = 0.0
        self._pending = False
        self.refused: dict[Path, str] = {}

    def due(self) -> bool:
        """Whether it is time to look again; cheap, may be called without the lock."""
        return time.monotonic() >= self._next_poll

    def refresh(self) -> None:
        """Look for new partitions and follow the known ones; what fails now is tried again."""
        now = time.monotonic()
        self._next_poll = now + _POLL_S
        scan = now >= self._next_scan
        if scan:
            self._next_scan = now + _RESCAN_S
            for path, partition in list(self.partitions.items()):
                with self._tolerant(partition.paths.lock):
                    if partition.replaced():
                        self._forget(path)
                        self._pending = True
        with self._tolerant(self._root / self._namespace):
            self._discover(now, force=scan)
        for path, partition in list(self.partitions.items()):
            if partition.followed or scan:
                with self._tolerant(path):
                    self._follow(partition)

    @contextmanager
    def _tolerant(self, path: Path) -> Iterator[None]:
        """Say once, until it goes well again, that something cannot be looked at."""
        try:
            yield
        except OSError as error:
            if path not in self._failing:
                _LOG.warning("%s: other writers' pages cannot be followed now: %s", path, error)
            self._failing.add(path)
        else:
            self._failing.discard(path)

    def _follow(self, partition: ReaderPartition) -> None:
        for change in partition.changes():
            if isinstance(change, Pages):
                self._hold(partition, change)
            else:
                self.lose(partition, change)

    def _discover(self, now: float, *, force: bool) -> None:
        listed = self._times(everywhere=force)
        if force:
            due = self._pending or now >= self._next_listing or listed != self._listed
        else:
            due = listed[:1] != self._listed[:1]
        if not due or not listed:
            return
        refused: dict[Path, str] = {}
        for paths in partition_paths(self._root, self._namespace):
            if paths == self._own or paths.root in self.partitions or paths.root.name != self._pool:
                continue
            match = PARTITION_NAME.fullmatch(paths.root.parent.name)
            if match is None or self._rank not in {None, match[1]}:
                continue
            try:
                self._owners.check(paths.root)
                partition = ReaderPartition(
                    paths, self._cache, boot=self._boot, expected=self._geometry, key=self._key
                )
            except (StoreError, OSError) as error:
                refused[paths.root] = str(error)
                continue
            self.partitions[paths.root] = partition
        self.refused, self._pending = refused, bool(refused)  # perhaps still being created
        self._listed = listed if force else self._times(everywhere=True)
        self._next_listing = now + _LISTING_S

    def _times(self, *, everywhere: bool) -> tuple[tuple[str, int, int], ...]:
        """Return what changes with what a folder holds: of the namespace, and `everywhere` of its ranks too.

        Two changes within one tick of the clock look like one; so everything is listed now and then anyway.
        """
        found: list[tuple[str, int, int]] = []
        space = self._root / self._namespace
        folders = [space]
        with suppress(FileNotFoundError):
            if everywhere:
                folders += [entry for entry in space.iterdir() if PARTITION_NAME.fullmatch(entry.name)]
            for folder in folders:
                stat = folder.stat()
                found.append((folder.name, stat.st_mtime_ns, stat.st_ino))
        return tuple(found)

    # -- the index -----------------------------------------------------------------------------------------

    def _hold(self, partition: ReaderPartition, pages: Pages) -> None:
        index, held = self.index, partition.held
        for slot, key in zip(pages.slots.tolist(), pages.keys, strict=True):
            old = held.get(slot)
            if old is not None and old != key:
                self._unlist(partition, slot, old)
            held[slot] = key
            place = (partition, slot)
            other = index.get(key)
            if other is not None and other != place:
                self._copies.setdefault(key, set()).add(other)
                self._copies[key].discard(place)
            index[key] = place

    def lose(self, partition: ReaderPartition, slots: NDArray[np.int64]) -> None:
        """Forget pages that are gone."""
        for slot in slots.tolist():
            key = partition.held.pop(slot, None)
            if key is not None:
                self._unlist(partition, slot, key)

    def places(self, key: bytes) -> list[tuple[ReaderPartition, int]]:
        """Return every place that a page is held at, the one in `index` first."""
        place = self.index.get(key)
        return [] if place is None else [place, *self._copies.get(key, ())]

    def lose_pages(self, partition: ReaderPartition, pages: Sequence[tuple[int, bytes]]) -> None:
        """Forget pages (slot, key) that turned out damaged, unless the slot holds another one by now."""
        for slot, key in pages:
            if partition.held.get(slot) == key:
                del partition.held[slot]
                self._unlist(partition, slot, key)

    def _unlist(self, partition: ReaderPartition, slot: int, key: bytes) -> None:
        """Take one place of a page out of the index; another place where it lies takes over."""
        place, copies = (partition, slot), self._copies.get(key)
        if copies is not None:
            copies.discard(place)
        if self.index.get(key) == place:
            if copies:
                self.index[key] = copies.pop()
            else:
                del self.index[key]
        if copies is not None and not copies:
            del self._copies[key]

    def lose_slabs(self, partition: ReaderPartition, damage: dict[int, str]) -> None:
        """Drop slabs of a partition whose files are not what they were.

        The next refreshes find out whether they are damaged, and say so, or were given up or made anew.
        """
        for number, why in damage.items():
            self.lose(partition, partition.doubt(number, why))

    def _forget(self, path: Path) -> None:
        partition = self.partitions.pop(path)
        for slot, key in partition.held.items():
            self._unlist(partition, slot, key)
        partition.close()

    def close(self) -> None:
        """Unmap everything."""
        self.index.clear()
        self._copies.clear()
        for partition in self.partitions.values():
            partition.close()
        self.partitions.clear()
