"""`PageStore`: pages of KV by key, on files that any Zarr reader opens."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from hicache_tier.errors import ClosedError, InvalidArgumentError

from .checksum import page_checksum
from .engine import ByteEngine, PageBatch
from .foreign import ForeignPages
from .keys import PageKey, normalise_key, normalise_keys
from .partition import Partition, ReaderPartition
from .record import (
    CHECKSUM_NONE,
    CHECKSUM_XXH3,
    FLAG_PINNED,
    GENERATION_WORD,
    SEQUENCE_WORD,
    as_records,
    checksum_seed,
    committed,
    key_field,
    key_head,
    new_records,
)
from .status import ABSENT, ALREADY_STORED, CHANGED, CHECKSUM, DELETED, LOADED, STORED, PageStatus, failed
from .writer import WriterPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from numpy.typing import ArrayLike, NDArray

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout

    from .capacity import RootBudget
    from .identity import Identity
    from .slab import FileCache

_LOG = logging.getLogger(__name__)
_TICK_S = 0.5
_ACCESS_PUBLISH_S = 60
_OPEN: weakref.WeakSet[PageStore] = weakref.WeakSet()


class HostPages(Protocol):
    """What the store needs of a host pool."""

    @property
    def geometry(self) -> KVGeometry:
        """What a page holds."""

    @property
    def layout(self) -> Layout:
        """How the pool orders its axes."""

    def segment_table(self, pages: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
        """Addresses `[n, F]` of each page's segments in stored order, and their lengths `[F]`."""

    def in_use(self) -> AbstractContextManager[object]:
        """Keep the memory mapped while the block runs."""


class PageStore:
    """A namespace of a store, open in this process. Make one with `open_store`.

    Thread-safe. `put`, `get` and `match_prefix` raise for wrong arguments only; a fault at run time is a
    falsy `PageStatus` with a reason, counted in `stats()`.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        layout: Layout,
        budget: RootBudget,
        engine: ByteEngine,
        cache: FileCache,
        writer: WriterPartition | None,
        foreign: ForeignPages,
        verify_always: bool,
        verify_foreign: bool,
        checksums: bool,
    ) -> None:
        self.identity = identity
        self.layout = layout
        self.geometry = identity.geometry
        self.root = budget.root
        self._budget = budget
        self._engine = engine
        self._cache = cache
        self._writer = writer
        self._foreign = foreign
        self._verify_always = verify_always
        self._verify_foreign = verify_foreign
        self._checksums = checksums
        self._lock = threading.Lock()
        self._index: dict[bytes, int] = {}
        self._writing: set[bytes] = set()
        self._counts: Counter[str] = Counter()
        self._touched: list[NDArray[np.int64]] = []
        self._closed = ""
        self._users = 0
        self._idle = threading.Condition(self._lock)
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        if writer is not None:
            self._index = {key: slot for slot, key in writer.keys.items()}
            with self._lock:
                self._shrink()
            self._keeper = threading.Thread(target=self._keep, name="hct-keeper", daemon=True)
            self._keeper.start()
        with self._lock:
            foreign.refresh()
        _OPEN.add(self)

    # -- looking up ------------------------------------------------------------------------------------

    def match_prefix(self, keys: Sequence[PageKey]) -> int:
        """Count the pages present, consecutively, from the first key on.

        Answered from memory; costs nothing per stored page. A page counted may be gone by the time it is
        read: `get` says so.
        """
        self._refresh()
        own, foreign = self._index, self._foreign.index
        count = 0
        for key in keys:
            if key not in own and key not in foreign:
                name = normalise_key(key)
                if name is key or (name not in own and name not in foreign):
                    break
            count += 1
        return count

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Tell for each key whether its page is present."""
        self._refresh()
        own, foreign = self._index, self._foreign.index
        return [key in own or key in foreign for key in normalise_keys(keys)]

    def __contains__(self, key: PageKey) -> bool:
        return self.contains([key])[0]

    def __len__(self) -> int:
        return len(self._index.keys() | self._foreign.index.keys())

    # -- putting ---------------------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[PageKey],
        host: HostPages,
        pages: ArrayLike,
        *,
        parents: Sequence[PageKey | None] | None = None,
        pin: bool = False,
    ) -> list[PageStatus]:
        """Store pages of a host pool.

        Parameters
        ----------
        keys : sequence of bytes or hex text
            One a page; at most 32 bytes, longer ones are stored as their SHA-256. A batch is taken as a chain
            in prefix order: its first page is kept longest.
        host : HostPool
            Of the store's geometry and axis order. The pages must not change until the call returns.
        pages : int tensor or sequence, [n]
            Page numbers, one a key.
        parents : sequence, optional
            Key of the page before each page in its chain, None at the root. With it, a page is never evicted
            before the pages that continue it, across batches too.
        pin : bool
            Keep the pages until `unpin`.

        Returns
        -------
        list of PageStatus
            True where the page is stored (`stored`, `already_stored`).

        Raises
        ------
        InvalidArgumentError, ClosedError
            Before anything is touched.
        """
        writer = self._writable()
        names = normalise_keys(keys)
        heads = self._parent_heads(names, parents)
        addresses, nbytes = self._segments(host, pages, len(names))
        self._refresh()
        with self._session(), host.in_use():
            return self._put(writer, names, heads, addresses, nbytes, pin=pin)

    def _put(
        self,
        writer: WriterPartition,
        names: list[bytes],
        heads: list[int],
        addresses: NDArray[np.uint64],
        nbytes: NDArray[np.uint64],
        *,
        pin: bool,
    ) -> list[PageStatus]:
        status = [ALREADY_STORED] * len(names)
        with self._lock:
            own, foreign, writing = self._index, self._foreign.index, self._writing
            todo: list[int] = []
            known: list[int] = []
            for at, name in enumerate(names):
                slot = own.get(name)
                if slot is not None:
                    known.append(slot)
                elif name not in foreign and name not in writing:
                    writing.add(name)
                    todo.append(at)
            if known:
                self._touch(np.array(known, np.int64))
            slots = self._allocate(writer, len(todo)) if todo else np.empty(0, np.int64)
            refused = todo[len(slots) :]
            todo = todo[: len(slots)]
            for at in refused:
                status[at] = failed(writer.no_room)
                writing.discard(names[at])
            first_sequence = writer.sequence + 1
            writer.sequence += len(slots)
        reasons = [""] * len(todo)
        if todo:
            try:
                reasons = self._write(
                    writer, slots, [names[at] for at in todo], [heads[at] for at in todo],
                    addresses[todo], nbytes, first_sequence, pin=pin,
                )  # fmt: skip
            finally:
                with self._lock:
                    writing.difference_update([names[at] for at in todo])
        for at, reason in zip(todo, reasons, strict=True):
            status[at] = failed(reason) if reason else STORED
        self._settle_duplicates(names, status, {*todo, *refused})
        self._count("put", status)
        return status

    def _settle_duplicates(self, names: list[bytes], status: list[PageStatus], first: set[int]) -> None:
        """Give later mentions of a key in one batch the verdict of the first."""
        if len(set(names)) == len(names):
            return
        outcome = {names[at]: status[at] for at in first if not status[at]}
        for at, name in enumerate(names):
            status[at] = outcome.get(name, status[at])

    def _write(
        self,
        writer: WriterPartition,
        slots: NDArray[np.int64],
        names: list[bytes],
        heads: list[int],
        addresses: NDArray[np.uint64],
        nbytes: NDArray[np.uint64],
        first_sequence: int,
        *,
        pin: bool,
    ) -> list[str]:
        """Write payloads and records of allocated slots; return "" or a reason for each."""
        count = len(slots)
        shape = writer.facts.shape
        now_ns = time.time_ns()
        records = new_records(count)
        records["key"] = key_field(names)
        records["key_nbytes"] = [len(name) for name in names]
        records["sequence"] = np.arange(first_sequence, first_sequence + count, dtype=np.uint64)
        records["valid_nbytes"] = shape.page_nbytes
        records["epoch"] = writer.state.epoch
        records["created_ns"] = now_ns
        records["access_s"] = now_ns // 1_000_000_000
        records["parent"] = heads
        records["tokens"] = self.geometry.page_tokens
        records["flags"] = FLAG_PINNED if pin else 0
        odd = writer.tables.mark_writing(slots)
        files, offsets = writer.locate(slots)
        batch = PageBatch(files, offsets, addresses, nbytes, shape.page_nbytes, shape.stride)
        if self._checksums:
            records["algorithm"] = CHECKSUM_XXH3
            sums = records["checksum"]
            rows, lengths = addresses.tolist(), nbytes.tolist()

            def hook(first: int, last: int) -> None:
                for at in range(first, last):
                    sums[at] = page_checksum(rows[at], lengths, checksum_seed(names[at]))

            batch.hook = hook
        reasons = self._engine.write(batch)
        damage = writer.tables.damaged(slots)
        if damage or any(reasons):
            return self._commit_some(writer, slots, names, heads, records, odd, reasons, damage)
        writer.publish(slots, records, odd)
        with self._lock:
            self._enter(writer, slots, names, heads, int(records["access_s"][0]), pin=pin)
        return reasons

    def _commit_some(
        self,
        writer: WriterPartition,
        slots: NDArray[np.int64],
        names: list[bytes],
        heads: list[int],
        records: NDArray[np.void],
        odd: NDArray[np.uint64],
        reasons: list[str],
        damage: dict[int, str],
    ) -> list[str]:
        """Commit the pages that were written; give the others' slots back."""
        slabs = (slots // writer.facts.shape.slots).tolist()
        damage = damage | {
            slab: reason.partition(": ")[2]
            for slab, reason in zip(slabs, reasons, strict=True)
            if reason.startswith("damaged") and slab not in damage
        }
        reasons = [
            f"damaged: {damage[slab]}" if slab in damage else why
            for slab, why in zip(slabs, reasons, strict=True)
        ]
        good = np.array([not reason for reason in reasons])
        with self._lock:
            self._drop_slabs(writer, damage)
            failed_slots = slots[
                [slab not in damage and bool(why) for slab, why in zip(slabs, reasons, strict=True)]
            ]
            if len(failed_slots):
                writer.give_back(failed_slots.tolist())
            writer.release(slots[~good])
        if good.any():
            chosen = np.flatnonzero(good).tolist()
            writer.publish(slots[good], records[good], odd[good])
            with self._lock:
                self._enter(
                    writer, slots[good], [names[at] for at in chosen], [heads[at] for at in chosen],
                    int(records["access_s"][0]), pin=bool(records["flags"][0] & FLAG_PINNED),
                )  # fmt: skip
        return reasons

    def _enter(
        self,
        writer: WriterPartition,
        slots: NDArray[np.int64],
        names: list[bytes],
        heads: list[int],
        access_s: int,
        *,
        pin: bool,
    ) -> None:
        writer.add(slots, names, heads, access_s=access_s)
        self._index.update(zip(names, slots.tolist(), strict=True))
        if pin:
            writer.pinned[slots] = True
        writer.announce(slots)
        writer.release(slots)

    def _allocate(self, writer: WriterPartition, count: int) -> NDArray[np.int64]:
        """Allocate on undamaged slabs; evicted pages leave the index."""
        while True:
            slots, evicted = writer.allocate(count)
            for name in evicted:
                self._index.pop(name, None)
            damage = writer.tables.damaged(slots)
            if not damage:
                return slots
            bad = np.isin(slots // writer.facts.shape.slots, list(damage))
            writer.give_back(slots[~bad].tolist())
            writer.release(slots)
            self._drop_slabs(writer, damage)

    # -- getting ---------------------------------------------------------------------------------------

    def get(self, keys: Sequence[PageKey], host: HostPages, pages: ArrayLike) -> list[PageStatus]:
        """Load pages into a host pool.

        Parameters
        ----------
        keys : sequence of bytes or hex text
        host : HostPool
            Of the store's geometry and axis order.
        pages : int tensor or sequence, [n]
            Page numbers to fill, one a key. A page whose status is falsy holds unspecified bytes.

        Returns
        -------
        list of PageStatus
            True where the page was loaded, whole and unchanged.

        Raises
        ------
        InvalidArgumentError, ClosedError
            Before anything is touched.
        """
        self._check_open()
        names = normalise_keys(keys)
        addresses, nbytes = self._segments(host, pages, len(names), unique=True)
        self._refresh()
        status = [ABSENT] * len(names)
        with self._session(), host.in_use():
            for partition, where, slots in self._find(names):
                self._read(partition, where, slots, names, addresses, nbytes, status)
        self._count("get", status)
        return status

    def _find(self, names: list[bytes]) -> list[tuple[Partition, list[int], NDArray[np.int64]]]:
        """Look up pages by partition; this process's own are pinned until `_read` is done."""
        own, foreign = self._index, self._foreign.index
        mine: list[int] = []
        slots: list[int] = []
        theirs: dict[ReaderPartition, tuple[list[int], list[int]]] = {}
        with self._lock:
            for at, name in enumerate(names):
                slot = own.get(name)
                if slot is not None:
                    mine.append(at)
                    slots.append(slot)
                    continue
                place = foreign.get(name)
                if place is not None:
                    group = theirs.setdefault(place[0], ([], []))
                    group[0].append(at)
                    group[1].append(place[1])
            found: list[tuple[Partition, list[int], NDArray[np.int64]]] = []
            if self._writer is not None and mine:
                index = np.array(slots, np.int64)
                np.add.at(self._writer.pins, index, 1)
                self._touch(index)
                found.append((self._writer, mine, index))
        found += [(part, where, np.array(at, np.int64)) for part, (where, at) in theirs.items()]
        return found

    def _read(
        self,
        partition: Partition,
        where: list[int],
        slots: NDArray[np.int64],
        names: list[bytes],
        addresses: NDArray[np.uint64],
        nbytes: NDArray[np.uint64],
        status: list[PageStatus],
    ) -> None:
        """Read pages of one partition and give each its verdict."""
        try:
            lost = self._read_pages(partition, where, slots, names, addresses, nbytes, status)
        finally:
            if partition is self._writer:
                with self._lock:
                    self._writer.release(slots)
        if lost:
            with self._lock:
                self._lose(partition, lost)

    def _read_pages(
        self,
        partition: Partition,
        where: list[int],
        slots: NDArray[np.int64],
        names: list[bytes],
        addresses: NDArray[np.uint64],
        nbytes: NDArray[np.uint64],
        status: list[PageStatus],
    ) -> list[int]:
        """Return the slots whose pages turned out lost."""
        damage = partition.tables.damaged(slots)
        if damage:
            keep = ~np.isin(slots // partition.facts.shape.slots, list(damage))
            for at, good, slot in zip(where, keep.tolist(), slots.tolist(), strict=True):
                if not good:
                    status[at] = failed(f"damaged: {damage[slot // partition.facts.shape.slots]}")
            with self._lock:
                self._drop_slabs(partition, damage)
            where = [at for at, good in zip(where, keep.tolist(), strict=True) if good]
            slots = slots[keep]
        order = np.argsort(slots, kind="stable")
        slots, index = slots[order], np.array(where, np.int64)[order]
        page_nbytes = partition.facts.shape.page_nbytes
        before = partition.tables.gather(slots)
        records = as_records(before)
        wanted = [names[at] for at in index.tolist()]
        good = committed(records, page_nbytes) & (records["key"] == key_field(wanted)).all(axis=1)
        good &= records["key_nbytes"] == [len(name) for name in wanted]
        lost: list[int] = []
        if not good.all():
            for at in index[~good].tolist():
                status[at] = CHANGED
            if partition is self._writer:
                lost += slots[~good].tolist()  # nobody else may change our records
            slots, index, before, records = slots[good], index[good], before[good], records[good]
        if not len(slots):
            return lost
        suspect = self._suspects(partition, slots, records)
        wrong: set[int] = set()
        batch = self._read_batch(partition, slots, index, names, records, suspect, wrong, addresses, nbytes)
        reasons = self._engine.read(batch)
        after = partition.tables.gather(slots) if not partition.tables.damaged(slots) else None
        self._judge(partition, slots, index, before, after, reasons, wrong, status, lost)
        if partition is self._writer and suspect.any():
            checked = [i for i in np.flatnonzero(suspect).tolist() if i not in wrong and not reasons[i]]
            self._writer.suspect[slots[checked]] = False
        return lost

    def _suspects(
        self, partition: Partition, slots: NDArray[np.int64], records: NDArray[np.void]
    ) -> NDArray[np.bool_]:
        """Tell which pages must be verified as they are read."""
        if self._verify_always:
            return records["algorithm"] != CHECKSUM_NONE
        if isinstance(partition, WriterPartition):
            marked: NDArray[np.bool_] = partition.suspect[slots]
            return marked
        theirs = isinstance(partition, ReaderPartition) and (partition.suspect or self._verify_foreign)
        return np.full(len(slots), theirs)

    def _read_batch(
        self,
        partition: Partition,
        slots: NDArray[np.int64],
        index: NDArray[np.int64],
        names: list[bytes],
        records: NDArray[np.void],
        suspect: NDArray[np.bool_],
        wrong: set[int],
        addresses: NDArray[np.uint64],
        nbytes: NDArray[np.uint64],
    ) -> PageBatch:
        shape = partition.facts.shape
        files, offsets = partition.locate(slots)
        batch = PageBatch(files, offsets, addresses[index], nbytes, shape.page_nbytes, shape.stride)
        if suspect.any():
            rows, lengths = batch.addresses.tolist(), batch.nbytes.tolist()
            sums, kinds = records["checksum"].tolist(), records["algorithm"].tolist()
            flags, places = suspect.tolist(), index.tolist()

            def hook(first: int, last: int) -> None:
                for at in range(first, last):
                    if flags[at]:
                        seed = checksum_seed(names[places[at]])
                        known = kinds[at] == CHECKSUM_XXH3
                        if not known or page_checksum(rows[at], lengths, seed) != sums[at]:
                            wrong.add(at)

            batch.hook = hook
        return batch

    def _judge(
        self,
        partition: Partition,
        slots: NDArray[np.int64],
        index: NDArray[np.int64],
        before: NDArray[np.uint64],
        after: NDArray[np.uint64] | None,
        reasons: list[str],
        wrong: set[int],
        status: list[PageStatus],
        lost: list[int],
    ) -> None:
        """Turn what was read into verdicts: I/O first, then a record that changed, then the checksum."""
        if after is None:
            for at in index.tolist():
                status[at] = failed("damaged: the slot table went away during the read")
            return
        same = before[:, GENERATION_WORD] == after[:, GENERATION_WORD]
        if not same.all():
            # A record re-published for its access time alone keeps its commit sequence.
            records = as_records(np.ascontiguousarray(after))  # type: ignore[arg-type]
            again = committed(records, partition.facts.shape.page_nbytes)
            same |= again & (before[:, SEQUENCE_WORD] == after[:, SEQUENCE_WORD])
        numbers = slots.tolist()
        for i, (at, unchanged) in enumerate(zip(index.tolist(), same.tolist(), strict=True)):
            if reasons[i]:
                status[at] = failed(reasons[i])
                if reasons[i].startswith("damaged"):
                    lost.append(numbers[i])
            elif not unchanged:
                status[at] = CHANGED
            elif i in wrong:
                status[at] = CHECKSUM
                lost.append(numbers[i])
            else:
                status[at] = LOADED

    def _lose(self, partition: Partition, slots: list[int]) -> None:
        """Drop pages that turned out damaged, so that the next put repairs them."""
        if isinstance(partition, ReaderPartition):
            self._foreign.lose(partition, np.array(slots, np.int64))
        elif isinstance(partition, WriterPartition):
            checked: dict[int, str] = {}
            for slab in {slot // partition.facts.shape.slots for slot in slots}:
                file = partition.slabs.get(slab)
                if file is None:
                    continue
                try:
                    with file.open(direct=False):
                        pass
                except Exception as error:  # noqa: BLE001 - whatever it is, the slab cannot serve
                    checked[slab] = str(error)
            self._drop_slabs(partition, checked)
            for name in partition.free(slots):
                self._index.pop(name, None)

    def _drop_slabs(self, partition: Partition, damage: dict[int, str]) -> None:
        if isinstance(partition, ReaderPartition):
            self._foreign.lose_slabs(partition, damage)
        elif isinstance(partition, WriterPartition):
            for number, why in damage.items():
                if number in partition.slabs:
                    for name in partition.drop_slab(number, why):
                        self._index.pop(name, None)
                    self._counts["slabs_dropped"] += 1

    # -- removing and pinning --------------------------------------------------------------------------

    def delete(self, keys: Sequence[PageKey]) -> list[PageStatus]:
        """Remove pages; `other_writer` where another process's partition holds the page."""
        writer = self._writable()
        names = normalise_keys(keys)
        with self._session(), self._lock:
            status: list[PageStatus] = []
            for name in names:
                slot = self._index.pop(name, None)
                if slot is None:
                    status.append(failed("other_writer") if name in self._foreign.index else ABSENT)
                else:
                    writer.free([slot])
                    status.append(DELETED)
        self._count("delete", status)
        return status

    def clear(self) -> int:
        """Remove every page that this process's partition holds; return how many. Files of others stay."""
        writer = self._writable()
        with self._session(), self._lock:
            count = len(writer.keys)
            writer.free(list(writer.keys))
            self._index.clear()
        return count

    def pin(self, keys: Sequence[PageKey]) -> list[PageStatus]:
        """Keep pages from eviction until `unpin`, over restarts too."""
        return self._pin(keys, pinned=True)

    def unpin(self, keys: Sequence[PageKey]) -> list[PageStatus]:
        """Let pages be evicted again."""
        return self._pin(keys, pinned=False)

    def _pin(self, keys: Sequence[PageKey], *, pinned: bool) -> list[PageStatus]:
        writer = self._writable()
        names = normalise_keys(keys)
        with self._session(), self._lock:
            slots = [self._index.get(name) for name in names]
            held = np.array([slot for slot in slots if slot is not None], np.int64)
            writer.set_pinned(held, pinned=pinned)
        word = PageStatus(True, "pinned" if pinned else "unpinned")
        return [ABSENT if slot is None else word for slot in slots]

    # -- state -----------------------------------------------------------------------------------------

    @property
    def engine_mode(self) -> str:
        """Engine and mode in use now, as `posix/direct`."""
        return f"{self._engine.name}/{self._engine.mode}"

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges as plain data: sizes in bytes, reasons by kind."""
        with self._lock:
            writer = self._writer
            shape = writer.facts.shape if writer else None
            groups: dict[str, dict[str, int]] = {"put": {}, "get": {}, "delete": {}}
            for name, count in self._counts.items():
                verb, _, reason = name.partition("/")
                if reason:
                    groups[verb][reason] = count
            return {
                **groups,
                "engine": self._engine.name,
                "mode": self._engine.mode,
                "namespace": self.identity.namespace,
                "partition": writer.name if writer else None,
                "pages": len(self._index),
                "pages_other_writers": len(self._foreign.index),
                "page_nbytes": self.geometry.page_nbytes,
                "capacity_bytes": self._budget.capacity_nbytes,
                "allocated_bytes": len(writer.slabs) * shape.file_nbytes if writer and shape else 0,
                "live_bytes": len(self._index) * shape.stride if shape else 0,
                "evictions": writer.evictions if writer else 0,
                "slabs_dropped": self._counts["slabs_dropped"],
                "suspect_pages": int(writer.suspect.sum()) if writer else 0,
                "damage": [
                    *(writer.damage if writer else ()),
                    *(line for part in self._foreign.partitions.values() for line in part.damage),
                ],
            }

    def close(self, timeout: float = 10.0) -> None:
        """Sync, state that the partition is clean, and let go of it.

        Calls in flight are waited for up to `timeout` seconds; after that the files are left as a killed
        process would leave them, which loses nothing that was committed.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = "the store is closed"
        self._stop.set()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join(timeout)
        with self._idle:
            quiet = self._idle.wait_for(lambda: self._users == 0, timeout)
            _OPEN.discard(self)
            if quiet:
                try:
                    if self._writer is not None:
                        self._publish_access(older_than_s=0)
                        self._writer.sync_and_close()
                finally:
                    self._foreign.close()
                    self._engine.close()
                    self._cache.close()
        if not quiet:
            _LOG.error(
                "%s: %d calls did not return within %.0f s: abandoned", self.root, self._users, timeout
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self._closed or f"{len(self._index)} pages, {self.engine_mode}"
        return f"PageStore({str(self.root)!r}, namespace={self.identity.namespace}, {state})"

    # -- inside ----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._closed}: {self.root}.")

    def _writable(self) -> WriterPartition:
        self._check_open()
        if self._writer is None:
            raise InvalidArgumentError("the store was opened read-only.")
        return self._writer

    def _session(self) -> _Session:
        return _Session(self)

    def _segments(
        self, host: HostPages, pages: ArrayLike, count: int, *, unique: bool = False
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Check that the pool fits and return its pages' addresses `uint64 [n, F]` and lengths `uint64 [F]`."""
        if host.geometry != self.geometry:
            raise InvalidArgumentError(
                f"the host pool holds {host.geometry.as_dict()}, the store {self.geometry.as_dict()}."
            )
        if host.layout.page_axes != self.layout.page_axes:
            raise InvalidArgumentError(
                f"the host pool is {host.layout.value}, the store {self.layout.value}: the order of axes differs."
            )
        numbers = np.asarray(pages)
        if numbers.ndim != 1 or len(numbers) != count:
            raise InvalidArgumentError(f"{count} keys need as many pages, got shape {numbers.shape}.")
        if count == 0:
            return np.empty((0, 1), np.uint64), np.empty(1, np.uint64)
        if numbers.dtype.kind not in "iu":
            raise InvalidArgumentError(f"page numbers must be integers, got {numbers.dtype}.")
        if unique and len(np.unique(numbers)) != count:
            raise InvalidArgumentError("a page is named twice: two keys cannot be loaded into one page.")
        addresses, nbytes = host.segment_table(pages)
        return addresses.astype(np.uint64, copy=False), nbytes.astype(np.uint64, copy=False)

    @staticmethod
    def _parent_heads(names: list[bytes], parents: Sequence[PageKey | None] | None) -> list[int]:
        if parents is None:
            return [0] * len(names)
        if len(parents) != len(names):
            raise InvalidArgumentError(f"{len(names)} keys need as many parents, got {len(parents)}.")
        return [0 if parent is None else key_head(normalise_key(parent)) for parent in parents]

    def _refresh(self) -> None:
        """Follow other writers, if it is time and nobody else is at it."""
        self._check_open()
        if self._foreign.due() and self._lock.acquire(blocking=False):
            try:
                self._foreign.refresh()
            except OSError as error:
                _LOG.warning("%s: other writers' pages cannot be followed: %s", self.root, error)
            finally:
                self._lock.release()

    def _touch(self, slots: NDArray[np.int64]) -> None:
        if self._writer is not None:
            self._writer.lru.touch(slots)
            self._touched.append(slots)

    def _count(self, verb: str, status: Iterable[PageStatus]) -> None:
        tally = Counter(verdict.kind for verdict in status)
        with self._lock:
            for reason, count in tally.items():
                self._counts[f"{verb}/{reason}"] += count

    def _publish_access(self, *, older_than_s: int) -> None:
        if self._writer is None or not self._touched:
            return
        slots = np.unique(np.concatenate(self._touched))
        self._touched.clear()
        slots = slots[np.isin(slots // self._writer.facts.shape.slots, list(self._writer.slabs))]
        self._writer.publish_access(slots, int(time.time()), older_than_s=older_than_s)

    def _shrink(self) -> None:
        """Give up slabs until the root is within a cap that was lowered."""
        writer = self._writer
        while writer is not None and len(writer.slabs) > 1 and self._budget.over():
            lost = writer.shed()
            if lost is None:
                break
            for name in lost:
                self._index.pop(name, None)

    def _keep(self) -> None:
        """Housekeeping on a thread of its own: access times, and slabs that other writers ask for."""
        while not self._stop.wait(_TICK_S):
            try:
                with self._lock:
                    self._publish_access(older_than_s=_ACCESS_PUBLISH_S)
                    if self._writer is not None and self._budget.excess(self._writer.paths):
                        for name in self._writer.shed() or ():
                            self._index.pop(name, None)
            except Exception:
                _LOG.exception("%s: housekeeping failed; it goes on", self.root)

    def _after_fork(self) -> None:
        """Let a child of fork use nothing of its parent's."""
        self._closed = "the store was opened by another process; open it again in this one"
        if self._writer is not None:
            os.close(self._writer.lock_fd)
            self._writer.lock_fd = -1


class _Session:
    """Counts a call in flight."""

    __slots__ = ("_store",)

    def __init__(self, store: PageStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        with self._store._lock:  # noqa: SLF001 - one class in two parts
            self._store._check_open()  # noqa: SLF001
            self._store._users += 1  # noqa: SLF001

    def __exit__(self, *_: object) -> None:
        with self._store._idle:  # noqa: SLF001
            self._store._users -= 1  # noqa: SLF001
            if not self._store._users:  # noqa: SLF001
                self._store._idle.notify_all()  # noqa: SLF001


def _forget_parents_stores() -> None:
    for store in list(_OPEN):
        store._after_fork()  # noqa: SLF001 - the same module
    _OPEN.clear()


os.register_at_fork(after_in_child=_forget_parents_stores)
