"""The partition that this process writes: slots are allocated, published, freed and evicted here.

Not thread-safe: it is called under the store's lock, except where a method says otherwise.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .asked_capacity import check_capacity
from .creation import documents_agree, existing_facts, slots_in_use, write_documents
from .eviction import LeafLru
from .free_slots import FreeSlots
from .growth import Growth
from .inside import ARRAY_FILE, RANK_FILE
from .journal import Journal
from .locks import hold_folder, let_go
from .metadata import replace_file, stored_axes
from .partition import Partition
from .partition_facts import PartitionFacts
from .publisher import Publisher
from .record import FLAG_PINNED, FREE, as_records, key_heads
from .recovery import opened_state, recover_pages
from .slab import FileCache, SlabDamagedError
from .state import boot_id
from .use_times import UseTimes, past_uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout

    from .capacity import RootBudget
    from .encryption import EncryptionKey
    from .partition_files import PartitionPaths

_LOG = logging.getLogger(__name__)


class WriterPartition(Partition):
    """A partition held for writing.

    Parameters
    ----------
    paths, writer, lock_fd
        From `creation.lock_partition`. The partition owns `lock_fd` from here on.
    rank, pool : str
    geometry, layout
        What a page is.
    budget : RootBudget
        Its lock must be held while the partition is constructed.
    cache : FileCache
    key : EncryptionKey, optional

    Attributes
    ----------
    capacity : int
        Length of the arrays: slots that the cap allows, or up to the last slab in use where that is more.
    keys : dict
        Key of each slot that holds a page.
    pins : int32, one a slot
        Reads and writes in flight; a slot is not reused while there are any.
    suspect : bool, one a slot
        Pages to verify when read.
    pinned : bool, one a slot
        Pages that are never evicted.
    stranded : int
        Slots set aside until the next open, because bytes for them may still be under way.
    records : Publisher
        Its records, as other processes see them.
    no_room : str
        Why the last slots that were asked for were not given.
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
        key: EncryptionKey | None = None,
    ) -> None:
        shape = check_capacity(geometry.page_nbytes, budget.capacity_nbytes)
        axes = len(stored_axes(geometry, layout, encrypted=key is not None))
        check = "" if key is None else key.check_of(paths.namespace)
        facts = PartitionFacts(rank, writer, pool, budget.capacity_nbytes, geometry, axes, shape, check)
        old, damage = existing_facts(paths, facts)
        if old is not None:
            facts = replace(facts, shape=old.shape)
        super().__init__(paths, facts, cache, writable=True, key=key)
        size = facts.shape.slots
        allowed = max(1, budget.capacity_nbytes // (size * facts.shape.stride)) * size
        self.capacity = max(allowed, slots_in_use(paths, facts))
        self.damage += [f"{self.name}: {line}" for line in damage]
        self.keys: dict[int, bytes] = {}
        self.lru = LeafLru(0)
        self.pins: NDArray[np.int32] = np.zeros(0, np.int32)
        self.suspect: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.pinned: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._lock_path = os.fspath(paths.lock)
        self._lock_identity = _identity(os.fstat(lock_fd))
        self._gone = False
        self._times = UseTimes()
        self._free = FreeSlots(size)
        self.evictions = 0
        self.stranded = 0
        self.no_room = "capacity"
        self.state, self._suspect_boot, trouble = opened_state(paths, facts.shape, self.capacity)
        if not documents_agree(paths, facts, self.capacity):
            write_documents(paths, facts, layout, self.capacity, budget.access)
        if trouble:
            self.report(trouble)
        self.sequence = self.state.sequence
        self._journal = Journal(paths.journal, writable=True, access=budget.access)
        self.records = Publisher(self, self._journal)
        self._growth = Growth(self, budget)
        self._files_access = budget.access
        try:
            self._load(self.capacity)
            self._write_state(clean=False)
            folder_fd = hold_folder(paths.root, RANK_FILE)
        except BaseException:
            self.close()
            self._journal.close()
            raise
        self._journal.invalidate()
        self._lock_fd, self._folder_fd = lock_fd, -1 if folder_fd is None else folder_fd

    def _load(self, most_slots: int) -> None:
        pages = recover_pages(self, most_slots=most_slots, unclean=self._suspect_boot is not None)
        self.resize(max((number + 1 for number in self.slabs), default=0) * self.facts.shape.slots)
        self.keys = dict(zip(pages.slots.tolist(), pages.keys, strict=True))
        heads, parents = key_heads(pages.records), pages.records["parent"]
        used = past_uses(pages.records)
        order = pages.order[np.argsort(used[pages.order], kind="stable")]
        self.lru.restore(pages.slots[order], heads[order], parents[order])
        self._times.stated[pages.slots] = pages.records["access_s"]
        self._times.used[pages.slots] = used
        self.pinned[pages.slots] = pages.records["flags"] & FLAG_PINNED != 0
        self.suspect[pages.slots] = self._suspect_boot is not None
        self.sequence = max(self.sequence, int(pages.records["sequence"].max(initial=0)))
        held = np.zeros(len(self.pins), np.bool_)
        held[pages.slots] = True
        size, free = self.facts.shape.slots, []
        for number, table in self.tables.tables.items():
            vacant = np.flatnonzero(~held[number * size : (number + 1) * size])
            torn = vacant[as_records(table.words[vacant])["state"] != FREE]
            self.records.publish_free(torn + number * size)
            free += (vacant + number * size).tolist()
        self._free.add(free)

    @property
    def is_gone(self) -> bool:
        """Whether the writer's lock, or its folder, was removed: what lies there may be another writer's.

        Once it is, it stays so: nobody knows what was done meanwhile. May be asked without the store's lock.
        """
        if not self._gone:
            try:
                stat = os.stat(self._lock_path, follow_symlinks=False)  # noqa: PTH116 - twice as fast as Path's
                self._gone = _identity(stat) != self._lock_identity
            except (FileNotFoundError, NotADirectoryError):
                self._gone = True
            except OSError:  # whatever needs the folder next will say it
                return False
        return self._gone

    def leave(self) -> list[bytes]:
        """Let go of a partition that is gone, touching no file; return the keys of its pages."""
        self.tell("it is gone: nothing is stored or loaded here until the store is opened again")
        return [key for number in list(self.slabs) for key in self.drop_slab(number, "")]

    def tell(self, what: str) -> None:
        """Say once, in the log and in `damage`, why the partition does not store what it might."""
        line = f"{self.name}: {what}"
        if line not in self.damage:
            self.damage.append(line)
            _LOG.warning("%s: %s", self.paths.root, what)

    # -- slots -----------------------------------------------------------------------------------------

    def resize(self, slots: int) -> None:
        """Have book-keeping for this many slots at least."""
        extra = slots - len(self.pins)
        if extra > 0:
            self.pins = np.concatenate([self.pins, np.zeros(extra, np.int32)])
            self.suspect = np.concatenate([self.suspect, np.zeros(extra, np.bool_)])
            self.pinned = np.concatenate([self.pinned, np.zeros(extra, np.bool_)])
            self._times.resize(extra)
            self.lru.resize(slots)

    def touch(self, slots: NDArray[np.int64]) -> None:
        """Make pages recent: the first of the chain most."""
        self.lru.touch(slots)
        self._times.touch(slots)

    def allocate(self, count: int) -> tuple[NDArray[np.int64], list[bytes]]:
        """Take up to `count` slots: free ones, then a new slab, then evicted ones. They become pinned.

        Returns
        -------
        (slots, evicted)
            Slots in ascending order, and the keys of the pages that were evicted for them.
        """
        evicted: list[bytes] = []
        while len(self._free) < count and self._growth.grow():
            pass
        taken = self._free.take(count)
        if len(taken) < count:
            victims, evicted = self.evict(count - len(taken))
            taken += victims
        slots = np.array(sorted(taken), np.int64)
        self.pins[slots] += 1
        self.suspect[slots] = False
        return slots, evicted

    def evict(self, count: int) -> tuple[list[int], list[bytes]]:
        """Take up to `count` pages out of the book-keeping, least recent leaves first: slots and keys."""
        victims = self.lru.pop(count, lambda slot: bool(self.pins[slot]), self.pinned)
        self.evictions += len(victims)
        return victims, [self.keys.pop(slot) for slot in victims]

    def take_free(self, *, outside: int) -> int | None:
        """Take one free slot that is not in the slab `outside`."""
        return self._free.take_outside(outside)

    def free_outside(self, slab: int) -> int:
        """Free slots that are not in a slab."""
        return self._free.count_outside(slab)

    def add(self, slots: NDArray[np.int64], keys: Sequence[bytes], records: NDArray[np.void]) -> None:
        """Enter published pages in the book-keeping and tell other processes."""
        self.keys.update(zip(slots.tolist(), keys, strict=True))
        self.lru.add(slots, key_heads(records), records["parent"])
        self._times.stated[slots] = self._times.used[slots] = records["access_s"]
        self.pinned[slots] = records["flags"] & FLAG_PINNED != 0
        self.trusted[slots] = records["sequence"]
        self._journal.append(slots)

    def add_slab(self, number: int) -> None:
        """Enter a new, mapped slab: its slots are free."""
        size = self.facts.shape.slots
        self.resize((number + 1) * size)
        self._free.add(range(number * size, (number + 1) * size))

    def hold(self, slots: NDArray[np.int64]) -> None:
        """Pin slots until `release`, once for each mention."""
        self._count_pins(slots, 1)

    def _count_pins(self, slots: NDArray[np.int64], by: int) -> None:
        if (slots[1:] > slots[:-1]).all():
            self.pins[slots] += by  # much the faster, and wrong where a slot is named twice
        else:
            np.add.at(self.pins, slots, by)

    def release(self, slots: NDArray[np.int64]) -> None:
        """Unpin slots; those freed meanwhile go back to the free list."""
        self._count_pins(slots, -1)
        self._free.release(slots, self.pins)

    def free(self, slots: Sequence[int]) -> list[bytes]:
        """Drop pages and return their keys; the slots wait until reads in flight are done."""
        gone = [slot for slot in slots if slot in self.keys]
        self.lru.remove(gone)
        keys = [self.keys.pop(slot) for slot in gone]
        self.pinned[gone] = False
        self.suspect[gone] = False
        self.give_back(gone)
        return keys

    def give_back(self, slots: Sequence[int]) -> None:
        """Return slots that hold no page (any more): records first."""
        if self.is_gone:  # they may hold another writer's
            return
        index = np.asarray(slots, np.int64)
        index = index[np.isin(index // self.facts.shape.slots, list(self.slabs))]
        damaged = list(self.tables.damaged(index))
        self.records.publish_free(index[~np.isin(index // self.facts.shape.slots, damaged)])
        self._free.give_back(index, self.pins)

    def damaged_slabs(self, slots: Sequence[int]) -> dict[int, str]:
        """Look at the files under these slots; return each slab that cannot serve, and why."""
        found = self.tables.damaged(np.asarray(slots, np.int64))
        for number in {slot // self.facts.shape.slots for slot in slots} - set(found):
            slab = self.slabs.get(number)
            if slab is not None:
                try:
                    with slab.open(direct=False):
                        pass
                except (SlabDamagedError, OSError) as error:
                    found[number] = str(error)
        return found

    def drop_slab(self, number: int, why: str) -> list[bytes]:
        """Forget a slab that is damaged, or given up (`why` empty); remove its files; return its keys."""
        if why:
            self.report(why)
        size = self.facts.shape.slots
        mine = range(number * size, (number + 1) * size)
        gone = [slot for slot in mine if slot in self.keys]
        self.lru.remove(gone)
        keys = [self.keys.pop(slot) for slot in gone]
        self.pinned[mine.start : mine.stop] = False
        self.suspect[mine.start : mine.stop] = False
        self._free.drop(mine)
        try:
            if self.is_gone:
                self.unmap_slab(number)
                return keys
            self.remove_slab_files(number)
        except OSError as error:
            self.report(f"slab {number} cannot be removed ({error.strerror})")
        self._journal.invalidate()
        return keys

    # -- records ---------------------------------------------------------------------------------------

    def publish_access(self, *, older_than_s: int, most: int | None = None) -> None:
        """Re-publish the records of pages whose time of use is not what they say; see `UseTimes.late`."""
        if not older_than_s:
            self._times.put_in_order(np.array(list(self.keys), np.int64), self.lru.ticks)
        late = self._times.late(older_than_s, most)
        late = late[[slot in self.keys and not self.pins[slot] for slot in late.tolist()]]
        self._republish(late)

    def set_pinned(self, slots: NDArray[np.int64], *, pinned: bool) -> None:
        """Set or clear the flag that keeps pages from eviction, in the records too."""
        self.pinned[slots] = pinned
        if not pinned:
            self.lru.recall(slots.tolist())
        self._republish(slots)

    def pin_more(self, slots: NDArray[np.int64]) -> None:
        """Pin those of these pages that are not pinned."""
        fresh = np.unique(slots[~self.pinned[slots]])
        if len(fresh):
            self.set_pinned(fresh, pinned=True)

    def _republish(self, slots: NDArray[np.int64]) -> None:
        """Have the records of pages say when they were used and whether they are pinned."""
        if self.is_gone:
            return
        done = self.records.republish(slots, self._times.used, self.pinned)
        self._times.stated[done] = self._times.used[done]

    def move(self, slot: int, target: int) -> bool:
        """Copy a page to a free slot and let the new record take over; False where that failed."""
        if self.is_gone or not self.records.copy(slot, target):
            self.give_back([target])
            return False
        self.lru.move(slot, target)
        self.keys[target] = self.keys.pop(slot)
        for column in (self._times.stated, self._times.used, self.suspect, self.pinned, self.trusted):
            column[target] = column[slot]
        self.pinned[slot] = self.suspect[slot] = False
        self.give_back([slot])
        return True

    def shed(self) -> tuple[bool, list[tuple[int, bytes]], list[bytes]]:
        """Give up one slab, see `Growth.shed`."""
        return self._growth.shed()

    # -- closing ---------------------------------------------------------------------------------------

    def _write_state(self, *, clean: bool) -> None:
        """State what is so now. While pages are suspect the boot they were written under stays."""
        suspects = bool(self.suspect.any())
        boot = self._suspect_boot if suspects and self._suspect_boot else boot_id()
        self.state = replace(
            self.state,
            boot_id=boot,
            clean=clean and not suspects,
            sequence=self.sequence,
            capacity=self.capacity,
        )
        replace_file(self.paths.state, self.state.pack(), ARRAY_FILE, self._files_access)

    def sync_and_close(self) -> bool:
        """Sync slabs, then tables, then state that the partition is clean; let go of it.

        Where that fails, it is False, and the partition is left unclean, as a killed process would leave it.
        """
        if self.is_gone:
            _LOG.warning("%s is gone: nothing is synced", self.paths.root)
            self.abandon()
            return False
        clean = True
        try:
            for sync in [
                *(slab.sync for slab in self.slabs.values()),
                *(table.sync for table in self.tables.tables.values()),
            ]:
                try:
                    sync()
                except (SlabDamagedError, OSError) as error:
                    clean = False
                    _LOG.warning("%s: cannot be synced: %s", self.name, error)
            self._write_state(clean=clean)
        except OSError as error:
            clean = False
            _LOG.warning("%s: cannot be closed cleanly: %s", self.name, error)
        finally:
            self.abandon()
        return clean

    def abandon(self) -> None:
        """Let go of everything without touching the files."""
        self.close()
        self._journal.close()
        self.disown_lock()

    def disown_lock(self) -> None:
        """Close this process's descriptors of the writer's lock and of the locked folder."""
        fds = self._lock_fd, self._folder_fd
        self._lock_fd = self._folder_fd = -1
        for fd in fds:
            if fd >= 0:
                let_go(fd)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    """Return what tells a file from all others, as long as it is open."""
    return stat.st_dev, stat.st_ino
