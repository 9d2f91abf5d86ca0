"""The partition that this process writes: slots are allocated, published, freed, evicted and grown here.

Not thread-safe: `PageStore` calls it under its lock, except where a method says otherwise.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import os
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.errors import FormatVersionError, StoreError, StoreFullError

from .capacity import RootBudget, remove_slab
from .eviction import LeafLru
from .identity import FORMAT_NAME, FORMAT_VERSION
from .journal import Journal
from .metadata import (
    component_table,
    group_document,
    pages_document,
    replace_file,
    slots_document,
    state_document,
    write_document,
)
from .partition import Partition, PartitionFacts, PartitionPaths
from .record import (
    CHECKSUM_NONE,
    COMMITTED,
    FLAG_PINNED,
    FREE,
    Words,
    as_records,
    as_words,
    new_records,
    seal,
)
from .slab import FileCache, SlabDamagedError, SlabShape, create_slab
from .state import STATE_NBYTES, StateBlock, boot_id
from .table import table_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout

_GROW_RETRY_S = 1.0


def lock_partition(space: Path, rank: str, pool: str) -> tuple[PartitionPaths, int, int]:
    """Take the first writer number of this rank that no live process holds.

    Returns
    -------
    (paths, number, fd)
        `fd` holds the flock; closing it gives the partition up.
    """
    for number in range(1 << 16):
        paths = PartitionPaths(space / f"{rank}-w{number}" / pool)
        for folder in (paths.root.parent, paths.root, paths.state.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        return paths, number, fd
    raise StoreError(f"{space}: every writer number of {rank} is taken.")


class WriterPartition(Partition):
    """A partition held for writing.

    Parameters
    ----------
    paths, writer, lock_fd
        From `lock_partition`. The partition owns `lock_fd` from here on.
    rank, pool : str
    geometry, layout
        What a page is.
    budget : RootBudget
        Its lock must be held while the partition is constructed.
    cache : FileCache
    """

    def __init__(
        self,
        paths: PartitionPaths,
        writer: int,
        lock_fd: int,
        *,
        rank: str,
        pool: str,
        geometry: KVGeometry,
        layout: Layout,
        budget: RootBudget,
        cache: FileCache,
    ) -> None:
        self.lock_fd = lock_fd
        self._budget = budget
        self._layout = layout
        chosen = SlabShape.choose(geometry.page_nbytes, budget.capacity_nbytes)
        needed = chosen.file_nbytes + table_nbytes(chosen.slots)
        if budget.capacity_nbytes < needed:
            raise StoreFullError(
                f"capacity_bytes={budget.capacity_nbytes} holds no page of {geometry.page_nbytes} bytes; "
                f"at least {needed} are needed."
            )
        facts = PartitionFacts(
            rank,
            writer,
            pool,
            budget.capacity_nbytes,
            geometry,
            len(layout.page_shape(geometry)),
            chosen,
        )
        old = self._existing(paths, facts)
        old_capacity = 0
        if old is not None:
            facts = replace(facts, shape=old.shape)
            old_capacity = old.capacity_nbytes // facts.shape.stride
        super().__init__(paths, facts, cache, writable=True)
        slots = facts.shape.slots
        self.capacity = max(1, budget.capacity_nbytes // (slots * facts.shape.stride)) * slots
        self.keys: dict[int, bytes] = {}
        self.lru = LeafLru(self.capacity)
        self.pins: NDArray[np.int32] = np.zeros(self.capacity, np.int32)
        self.suspect: NDArray[np.bool_] = np.zeros(self.capacity, np.bool_)
        self.pinned: NDArray[np.bool_] = np.zeros(self.capacity, np.bool_)
        self._access: NDArray[np.uint64] = np.zeros(self.capacity, np.uint64)
        self._free: list[int] = []
        self._limbo: set[int] = set()
        self._no_growth_until = 0.0
        self.evictions = 0
        self.no_room = "capacity"
        if old is None or old != facts:
            self._create(write_state=old is None)
        self._most_slots = max(self.capacity, old_capacity)
        state, self._unclean_boot = self._open_state()
        self._journal = Journal(paths.journal, writable=True)
        self._journal.invalidate()
        self.sequence = state.sequence
        self.state = state
        self._load()
        self._write_state(clean=False)

    # -- opening ---------------------------------------------------------------------------------------

    def _existing(self, paths: PartitionPaths, wanted: PartitionFacts) -> PartitionFacts | None:
        """Return the facts of a usable partition at `paths`; clear away one that is not usable."""
        for folder in (paths.root, paths.pages, paths.slots, paths.state.parent):
            for leftover in folder.glob("*.tmp"):
                leftover.unlink()
        if not (paths.root / "zarr.json").exists():
            self._wipe(paths)
            return None
        try:
            facts = PartitionFacts.read(paths)
        except FormatVersionError:
            raise
        except StoreError:
            self._wipe(paths)
            return None
        fits = facts.shape.file_nbytes + table_nbytes(facts.shape.slots) <= wanted.capacity_nbytes
        if facts.geometry != wanted.geometry or facts.page_axes != wanted.page_axes or not fits:
            self._wipe(paths)
            return None
        return facts

    @staticmethod
    def _wipe(paths: PartitionPaths) -> None:
        """Remove slabs and tables of a partition that cannot be used as it is."""
        with suppress(FileNotFoundError):
            (paths.root / "zarr.json").unlink()
        for number in paths.slab_numbers():
            for slab in paths.pages.glob(f"c.{number}.*"):
                slab.unlink()
            paths.table(number).unlink()

    def _create(self, *, write_state: bool) -> None:
        """Write the Zarr documents; the partition's own group last."""
        paths, facts, layout = self.paths, self.facts, self._layout
        shape = facts.shape
        for folder in (paths.pages, paths.slots, paths.state.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        write_document(paths.pages, pages_document(facts.geometry, layout, self.capacity, shape.slots))
        write_document(paths.slots, slots_document(self.capacity, shape.slots))
        write_document(paths.state.parent, state_document())
        if write_state:
            replace_file(paths.state, self._fresh_state().pack())
        attributes = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "rank": facts.rank,
            "writer": facts.writer,
            "pool": facts.pool,
            "capacity_bytes": facts.capacity_nbytes,
            "geometry": facts.geometry.as_dict(),
            "axis_order": layout.page_axes,
            "logical_dtype": facts.geometry.dtype.label,
            "components": component_table(facts.geometry, layout),
            "page_axes": facts.page_axes,
            "page_nbytes": shape.page_nbytes,
            "stride": shape.stride,
            "slots_per_slab": shape.slots,
        }
        write_document(paths.root, group_document(attributes))

    def _fresh_state(self, store_uuid: bytes | None = None) -> StateBlock:
        shape = self.facts.shape
        return StateBlock(
            store_uuid or uuid.uuid4().bytes,
            boot_id(),
            os.getpid(),
            0,
            True,
            0,
            shape.slots,
            shape.stride,
            shape.page_nbytes,
            self.capacity,
        )

    def _open_state(self) -> tuple[StateBlock, bytes | None]:
        """Return this opening's state, and the boot whose pages are suspect (None where there is none)."""
        boot = boot_id()
        try:
            with self.paths.state.open("rb") as file:
                old = StateBlock.unpack(file.read(STATE_NBYTES + 1), self.paths.state)
        except FormatVersionError:
            raise
        except (OSError, StoreError) as error:
            self.report(f"state block unreadable ({error}); every page will be verified")
            old = replace(self._fresh_state(), clean=False, boot_id=bytes(16))
        unclean = None if old.clean or old.boot_id == boot else old.boot_id
        shape = self.facts.shape
        state = replace(
            old,
            boot_id=boot,
            pid=os.getpid(),
            epoch=old.epoch + 1,
            clean=False,
            slots_per_slab=shape.slots,
            stride=shape.stride,
            page_nbytes=shape.page_nbytes,
            capacity=self.capacity,
        )
        return state, unclean

    def _load(self) -> None:
        """Map every slab; keep committed pages, free everything else."""
        found = []
        for number in self.paths.slab_numbers():
            slots = self.facts.shape.slots
            try:
                if (number + 1) * slots > self._most_slots:
                    raise SlabDamagedError(f"slab {number} lies beyond the array")  # noqa: TRY301
                self.map_slab(number)
            except (SlabDamagedError, OSError) as error:
                if isinstance(error, PermissionError):
                    raise
                self.report(str(error))
                remove_slab(self.paths.slab(number, self.facts.page_axes), self.paths.table(number))
                continue
            if (number + 1) * slots > self.capacity:
                self._enlarge((number + 1) * slots)
            found.append(self.pages_of(number))
        slots = np.concatenate([pages.slots for pages in found]) if found else np.empty(0, np.int64)
        records = np.concatenate([pages.records for pages in found]) if found else new_records(0)
        keys = [key for pages in found for key in pages.keys]
        if self._unclean_boot is not None:
            unverifiable = records["algorithm"] == CHECKSUM_NONE
            if unverifiable.any():
                keep = ~unverifiable
                keys = [key for key, good in zip(keys, keep.tolist(), strict=True) if good]
                slots, records = slots[keep], records[keep]
            self.suspect[slots] = True
        # Duplicates: the highest commit sequence wins, so later entries overwrite earlier ones.
        by_sequence = np.argsort(records["sequence"], kind="stable")
        newest = {keys[i]: i for i in by_sequence.tolist()}
        order = np.fromiter(newest.values(), np.int64, len(newest))
        recency = np.lexsort((records["sequence"][order], records["access_s"][order]))
        order = order[recency]
        slots, records = slots[order], records[order]
        keys = [keys[i] for i in order.tolist()]
        numbers = slots.tolist()
        self.keys = dict(zip(numbers, keys, strict=True))
        heads = np.ascontiguousarray(records["key"][:, :8]).view("<u8").ravel().tolist()
        self.lru.restore(numbers, heads, records["parent"].tolist())
        self._access[slots] = records["access_s"]
        self.pinned[slots] = records["flags"] & FLAG_PINNED != 0
        self.sequence = max(self.sequence, int(records["sequence"].max(initial=0)))
        self._free_rest()

    def _enlarge(self, capacity: int) -> None:
        """Make room in the book-keeping for slabs above a lowered capacity, until they are shed."""
        extra = capacity - len(self.pins)
        if extra > 0:
            self.pins = np.concatenate([self.pins, np.zeros(extra, np.int32)])
            self.suspect = np.concatenate([self.suspect, np.zeros(extra, np.bool_)])
            self.pinned = np.concatenate([self.pinned, np.zeros(extra, np.bool_)])
            self._access = np.concatenate([self._access, np.zeros(extra, np.uint64)])
            self.lru.resize(capacity)

    def _free_rest(self) -> None:
        slots = self.facts.shape.slots
        held = np.zeros(len(self.pins), np.bool_)
        held[list(self.keys)] = True
        for number, table in self.tables.tables.items():
            first = number * slots
            live = held[first : first + slots]
            dirty = np.flatnonzero(~live & table.words.any(axis=1))
            torn = dirty[as_records(table.words[dirty])["state"] != FREE]
            if len(torn):
                self._publish_free(torn + first)
            self._free += (np.flatnonzero(~live) + first).tolist()
        heapq.heapify(self._free)

    # -- slots -----------------------------------------------------------------------------------------

    def allocate(self, count: int) -> tuple[NDArray[np.int64], list[bytes]]:
        """Take up to `count` slots: free ones, then a new slab, then evicted ones. They become pinned.

        Returns
        -------
        (slots, evicted)
            Slots in ascending order, and the keys of the pages that were evicted for them.
        """
        evicted: list[bytes] = []
        while len(self._free) < count and self._grow():
            pass
        free = self._free
        taken = [heapq.heappop(free) for _ in range(min(count, len(free)))]
        if len(taken) < count:
            victims = self.lru.pop(count - len(taken), self._spared)
            self.evictions += len(victims)
            evicted = [self.keys.pop(slot) for slot in victims]
            taken += victims
        slots = np.array(sorted(taken), np.int64)
        self.pins[slots] += 1
        self.suspect[slots] = False
        return slots, evicted

    def _spared(self, slot: int) -> bool:
        return bool(self.pins[slot] or self.pinned[slot])

    def add(
        self, slots: NDArray[np.int64], keys: Sequence[bytes], parents: Sequence[int], *, access_s: int
    ) -> None:
        """Enter published pages in the book-keeping."""
        self.keys.update(zip(slots.tolist(), keys, strict=True))
        self.lru.add(slots, keys, parents)
        self._access[slots] = access_s

    def release(self, slots: NDArray[np.int64]) -> None:
        """Unpin slots; those freed meanwhile go back to the free list."""
        np.subtract.at(self.pins, slots, 1)
        if self._limbo:
            for slot in {*slots.tolist()} & self._limbo:
                if not self.pins[slot]:
                    self._limbo.discard(slot)
                    heapq.heappush(self._free, slot)

    def free(self, slots: Sequence[int]) -> list[bytes]:
        """Drop pages: records first, then the slots, which wait until reads in flight are done."""
        index = np.array([slot for slot in slots if slot in self.keys], np.int64)
        if not len(index):
            return []
        usable = index[np.isin(index // self.facts.shape.slots, list(self.tables.tables))]
        if len(usable) and not self.tables.damaged(usable):
            self._publish_free(usable)
        self.lru.remove(index.tolist())
        keys = [self.keys.pop(slot) for slot in index.tolist()]
        self.pinned[index] = False
        for slot in index.tolist():
            self._give_back(slot)
        return keys

    def give_back(self, slots: Sequence[int]) -> None:
        """Return slots that were allocated and never published."""
        if len(slots):
            index = np.asarray(slots, np.int64)
            if not self.tables.damaged(index):
                self._publish_free(index)
            for slot in index.tolist():
                self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        if slot // self.facts.shape.slots not in self.slabs:
            return
        if self.pins[slot]:
            self._limbo.add(slot)
        else:
            heapq.heappush(self._free, slot)

    def _publish_free(self, slots: NDArray[np.int64]) -> None:
        odd = self.tables.mark_writing(slots)
        records = new_records(len(slots))
        records["state"] = FREE
        records["generation"] = odd + np.uint64(1)
        seal(records)
        self.tables.publish(slots, as_words(records))
        self._journal.append(slots)

    def publish(self, slots: NDArray[np.int64], records: NDArray[np.void], odd: NDArray[np.uint64]) -> None:
        """Store committed records. Safe without the store's lock: the slots are pinned."""
        records["state"] = COMMITTED
        records["generation"] = odd + np.uint64(1)
        seal(records)
        self.tables.publish(slots, as_words(records))

    def announce(self, slots: NDArray[np.int64]) -> None:
        """Tell other processes that these slots changed."""
        self._journal.append(slots)

    # -- growing and shrinking -------------------------------------------------------------------------

    def _grow(self) -> bool:
        """Add a slab where the root's cap and the disk allow it."""
        shape = self.facts.shape
        if (len(self.slabs) + 1) * shape.slots > self.capacity or time.monotonic() < self._no_growth_until:
            return False
        nbytes = shape.file_nbytes + table_nbytes(shape.slots)
        try:
            with self._budget.lock():
                self.no_room = self._budget.room_for(nbytes, self.paths)
                if not self.no_room:
                    self._add_slab()
                    return True
            if self.no_room == "capacity":
                self._budget.ask_for_room()
        except OSError as error:
            self.no_room = (
                "disk_full" if error.errno in {errno.ENOSPC, errno.EDQUOT} else f"io_error: {error.strerror}"
            )
        self._no_growth_until = time.monotonic() + _GROW_RETRY_S
        return False

    def _add_slab(self) -> None:
        shape = self.facts.shape
        number = next(n for n in range(len(self.slabs) + 1) if n not in self.slabs)
        table, slab = self.paths.table(number), self.paths.slab(number, self.facts.page_axes)
        replace_file(table, bytes(table_nbytes(shape.slots)))
        try:
            create_slab(slab, shape)
            self.map_slab(number)
        except BaseException:
            remove_slab(slab, table)
            raise
        first = number * shape.slots
        self._enlarge(first + shape.slots)
        for slot in range(first, first + shape.slots):
            heapq.heappush(self._free, slot)

    def drop_slab(self, number: int, why: str) -> list[bytes]:
        """Forget a slab that is damaged or given up; return the keys it held. Its files are removed."""
        first = number * self.facts.shape.slots
        gone = [slot for slot in range(first, first + self.facts.shape.slots) if slot in self.keys]
        if why:
            self.report(why)
        self.lru.remove(gone)
        keys = [self.keys.pop(slot) for slot in gone]
        self.pinned[first : first + self.facts.shape.slots] = False
        self._free = [slot for slot in self._free if slot // self.facts.shape.slots != number]
        heapq.heapify(self._free)
        self._limbo = {slot for slot in self._limbo if slot // self.facts.shape.slots != number}
        self.unmap_slab(number)
        remove_slab(self.paths.slab(number, self.facts.page_axes), self.paths.table(number))
        self._journal.invalidate()
        return keys

    def shed(self) -> list[bytes] | None:
        """Give up one slab, keeping the most recent pages; return the keys lost, None where it cannot now.

        Pages in use stay where they are, so a slab with any is not given up.
        """
        shape = self.facts.shape
        if len(self.slabs) <= 1:
            return None
        idle = [n for n in self.slabs if not self.pins[n * shape.slots : (n + 1) * shape.slots].any()]
        if not idle:
            return None
        number = max(idle)
        lost: list[bytes] = []
        room = (len(self.slabs) - 1) * shape.slots - int((self.pins > 0).sum())
        surplus = len(self.keys) - room
        if surplus > 0:
            victims = self.lru.pop(surplus, self._spared)
            self.evictions += len(victims)
            lost += [self.keys.pop(slot) for slot in victims]
            self.give_back(victims)
        first = number * shape.slots
        for slot in [slot for slot in range(first, first + shape.slots) if slot in self.keys]:
            target = self._free_outside(number)
            if target is None or not self._move(slot, target):
                lost += self.free([slot])
        self.drop_slab(number, "")
        return lost

    def _free_outside(self, number: int) -> int | None:
        kept: list[int] = []
        target = None
        while self._free and target is None:
            slot = heapq.heappop(self._free)
            if slot // self.facts.shape.slots == number:
                kept.append(slot)
            else:
                target = slot
        for slot in kept:
            heapq.heappush(self._free, slot)
        return target

    def _move(self, slot: int, target: int) -> bool:
        """Copy a page to another slot and let the new record take over."""
        shape = self.facts.shape
        old, new = np.array([slot], np.int64), np.array([target], np.int64)
        (source, destination), (at, to) = self.locate(np.array([slot, target]))
        try:
            with source.open(direct=False) as fd:
                payload = os.pread(fd, shape.page_nbytes, int(at))
            odd = self.tables.mark_writing(new)
            with destination.open(direct=False) as fd:
                whole = len(payload) == shape.page_nbytes and os.pwrite(fd, payload, int(to)) == len(payload)
        except (OSError, SlabDamagedError):
            whole = False
        if not whole:
            self.give_back([target])
            return False
        words: Words = self.tables.gather(old)
        records = as_records(words)
        self.publish(new, records, odd)
        self._journal.append(new)
        self.lru.move(slot, target)
        self.keys[target] = self.keys.pop(slot)
        self._access[target], self.suspect[target] = self._access[slot], self.suspect[slot]
        self.pinned[target] = self.pinned[slot]
        self._publish_free(old)
        return True

    # -- recency and closing ---------------------------------------------------------------------------

    def publish_access(self, slots: NDArray[np.int64], access_s: int, *, older_than_s: int) -> None:
        """Re-publish the records of pages whose stored access time is older than that many seconds."""
        slots = slots[[slot in self.keys for slot in slots.tolist()]]
        slots = slots[(self._access[slots] + np.uint64(older_than_s) <= access_s) & (self.pins[slots] == 0)]
        if not len(slots) or self.tables.damaged(slots):
            return
        odd = self.tables.mark_writing(slots)
        records = as_records(self.tables.gather(slots))
        records["access_s"] = access_s
        self.publish(slots, records, odd)
        self._access[slots] = access_s

    def set_pinned(self, slots: NDArray[np.int64], *, pinned: bool) -> None:
        """Set or clear the flag that keeps pages from eviction, in the records too."""
        if not len(slots) or self.tables.damaged(slots):
            return
        odd = self.tables.mark_writing(slots)
        records = as_records(self.tables.gather(slots))
        flags = records["flags"] & ~np.uint32(FLAG_PINNED)
        records["flags"] = flags | np.uint32(FLAG_PINNED if pinned else 0)
        self.publish(slots, records, odd)
        self.pinned[slots] = pinned

    def _write_state(self, *, clean: bool) -> None:
        suspects = bool(self.suspect.any())
        boot = self._unclean_boot if suspects and self._unclean_boot else boot_id()
        self.state = replace(
            self.state,
            boot_id=boot,
            clean=clean and not suspects,
            sequence=self.sequence,
            capacity=self.capacity,
        )
        replace_file(self.paths.state, self.state.pack())

    def sync_and_close(self) -> None:
        """Sync slabs, then tables, then state that the partition is clean; let go of it."""
        try:
            self._cache.sync()
            for table in self.tables.tables.values():
                table.sync()
            self._write_state(clean=True)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of everything without touching the files."""
        self.close()
        self._journal.close()
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1
