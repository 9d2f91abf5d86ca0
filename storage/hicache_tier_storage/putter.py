"""Storing pages: allocate slots, write payloads, publish records."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .checksum import page_checksum
from .engine import PageBatch, moved
from .record import CHECKSUM_XXH3, FLAG_PINNED, checksum_seed, key_field, new_records
from .slab import SlabDamagedError
from .status import ALREADY_STORED, STORED, PageStatus, failed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from .core import StoreCore
    from .writer import WriterPartition


@dataclass(slots=True)
class Offer:
    """Pages offered for storing: one row each of everything but `nbytes`.

    Attributes
    ----------
    keys : list of bytes
    parent_keys : sequence of bytes
        Keys of the parents, those that there are.
    parents : list of int
        First 8 bytes of each page's parent's key as stored, 0 at the root.
    addresses : uint64 [n, F]
    nbytes : uint64 [F]
    """

    keys: list[bytes]
    parent_keys: Sequence[bytes]
    parents: list[int]
    addresses: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]

    def take(self, rows: list[int]) -> Offer:
        """Return the chosen rows."""
        if len(rows) == len(self.keys):
            return self
        keys, parents = [self.keys[i] for i in rows], [self.parents[i] for i in rows]
        return Offer(keys, (), parents, self.addresses[rows], self.nbytes)


@dataclass(slots=True)
class _Pending:
    """Pages on their way to disk: allocated slots, what goes there, and the slots' odd generations."""

    slots: NDArray[np.int64]
    offer: Offer
    records: NDArray[np.void]
    odd: NDArray[np.uint64]

    def take(self, rows: list[int]) -> _Pending:
        return _Pending(self.slots[rows], self.offer.take(rows), self.records[rows], self.odd[rows])


class Putter:
    """The put side of an open store.

    Parameters
    ----------
    core : StoreCore
    writer : WriterPartition
    checksums : bool
        Whether a checksum is stored with each page.
    """

    def __init__(self, core: StoreCore, writer: WriterPartition, *, checksums: bool) -> None:
        self._core = core
        self._writer = writer
        self._checksums = checksums

    def put(self, offer: Offer, *, pin: bool) -> list[PageStatus]:
        """Store what is not stored yet; one verdict a page."""
        core, keys = self._core, offer.keys
        status: list[PageStatus] = [ALREADY_STORED] * len(keys)
        with core.lock:
            todo, kept, elsewhere = self._claim(offer)
            slots = self._allocate(len(todo), kept) if todo else np.empty(0, np.int64)
            refused, todo = todo[len(slots) :], todo[: len(slots)]
            core.writing.difference_update([keys[at] for at in refused])
            verdict = failed(self._writer.no_room)
            sequence = self._writer.sequence + 1
            self._writer.sequence += len(slots)
        for at in refused:
            status[at] = verdict
        if todo:
            chosen = offer.take(todo)
            try:
                reasons = self._write(slots, chosen, sequence, pin=pin)
            except BaseException:
                with core.lock:
                    self._writer.give_back(slots.tolist())
                    self._writer.release(slots)
                raise
            finally:
                with core.lock:
                    self._writer.release(kept)
                    core.writing.difference_update(chosen.keys)
                    core.written.notify_all()
            for at, reason in zip(todo, reasons, strict=True):
                status[at] = failed(reason) if reason else STORED
        if elsewhere:
            self._await(elsewhere, keys, status)
        _settle_duplicates(keys, status)
        core.count("put", status)
        return status

    def _claim(self, offer: Offer) -> tuple[list[int], NDArray[np.int64], list[int]]:
        """Choose the rows that this call stores; what is stored already becomes recent.

        Returns
        -------
        (todo, kept, elsewhere)
            Rows to store; slots of the pages of the batch and of their parents that are stored already,
            pinned so that none of them is evicted for the batch; rows that are being stored now, by another
            call or by an earlier row of this one.
        """
        core, writer = self._core, self._writer
        own, foreign, writing = core.index, core.foreign.index, core.writing
        todo: list[int] = []
        known: list[int] = []
        elsewhere: list[int] = []
        for at, key in enumerate(offer.keys):
            if key in own:
                known.append(own[key])
            elif key in writing:
                elsewhere.append(at)
            elif key not in foreign:
                writing.add(key)
                todo.append(at)
        if known:
            core.touch(np.array(known, np.int64))
        if not todo:
            return todo, np.empty(0, np.int64), elsewhere
        known += [own[parent] for parent in offer.parent_keys if parent in own]
        kept = np.unique(np.array(known, np.int64))
        writer.pins[kept] += 1
        return todo, kept, elsewhere

    def _await(self, rows: list[int], keys: list[bytes], status: list[PageStatus]) -> None:
        """Wait for other calls that store these pages: what they could not store is not stored."""
        core = self._core
        with core.lock:
            core.written.wait_for(lambda: not any(keys[at] in core.writing for at in rows))
            for at in rows:
                if keys[at] not in core.index and keys[at] not in core.foreign.index:
                    status[at] = failed("lost_race")

    def _allocate(self, count: int, kept: NDArray[np.int64]) -> NDArray[np.int64]:
        """Allocate on undamaged slabs; evicted pages leave the index. Without any, `kept` is unpinned."""
        core, writer = self._core, self._writer
        while True:
            slots, evicted = writer.allocate(count)
            core.forget(evicted)
            damage = writer.tables.damaged(slots)
            if not damage:
                if not len(slots):
                    writer.release(kept)
                return slots
            bad = np.isin(slots // writer.facts.shape.slots, list(damage))
            writer.give_back(slots[~bad].tolist())
            writer.release(slots)
            core.drop_slabs(writer, damage)

    def _write(self, slots: NDArray[np.int64], offer: Offer, sequence: int, *, pin: bool) -> list[str]:
        """Write payloads and records of allocated slots; "" or a reason for each."""
        core, writer = self._core, self._writer
        shape = writer.facts.shape
        records = self._records(offer, sequence, pin=pin)
        pending = _Pending(slots, offer, records, np.zeros(len(slots), np.uint64))
        try:
            pending.odd = writer.tables.mark_writing(slots)
            files, offsets = writer.locate(slots)
        except SlabDamagedError:
            return self._commit_some(pending, ["slab_dropped"] * len(slots), {})
        batch = PageBatch(files, offsets, offer.addresses, offer.nbytes, shape.page_nbytes, shape.stride)
        if self._checksums:
            records["algorithm"] = CHECKSUM_XXH3
            batch.hook = _checksummer(offer, records["checksum"])
        reasons = moved(core.engine, batch, write=True)
        damage = writer.tables.damaged(slots)
        if damage or any(reasons) or not self._commit(pending):
            return self._commit_some(pending, reasons, damage)
        return reasons

    def _records(self, offer: Offer, sequence: int, *, pin: bool) -> NDArray[np.void]:
        writer, count = self._writer, len(offer.keys)
        now_ns = time.time_ns()
        records = new_records(count)
        records["key"] = key_field(offer.keys)
        records["key_nbytes"] = [len(key) for key in offer.keys]
        records["sequence"] = np.arange(sequence, sequence + count, dtype=np.uint64)
        records["valid_nbytes"] = writer.facts.shape.page_nbytes
        records["epoch"] = writer.state.epoch
        records["created_ns"] = now_ns
        records["access_s"] = now_ns // 1_000_000_000
        records["parent"] = offer.parents
        records["tokens"] = self._core.geometry.page_tokens
        records["flags"] = FLAG_PINNED if pin else 0
        return records

    def _commit(self, pending: _Pending) -> bool:
        """Publish and enter pages; False, and nothing done, where a slab was dropped meanwhile."""
        core, writer, slots = self._core, self._writer, pending.slots
        try:
            writer.publish(slots, pending.records, pending.odd)
        except SlabDamagedError:
            return False
        with core.lock:
            if any(number not in writer.slabs for number in writer.tables.slabs_of(slots)):
                return False
            writer.add(slots, pending.offer.keys, pending.records)
            core.index.update(zip(pending.offer.keys, slots.tolist(), strict=True))
            writer.release(slots)
        return True

    def _commit_some(self, pending: _Pending, reasons: list[str], damage: dict[int, str]) -> list[str]:
        """Commit the pages that were written; give the others' slots back."""
        core, writer, slots = self._core, self._writer, pending.slots
        slabs = (slots // writer.facts.shape.slots).tolist()
        damage |= {slab: "it was dropped" for slab in set(slabs) if slab not in writer.slabs}
        for slab, why in zip(slabs, reasons, strict=True):
            if why.startswith("damaged"):
                damage.setdefault(slab, why.partition(": ")[2])
        reasons = [
            f"damaged: {damage[slab]}" if slab in damage else why
            for slab, why in zip(slabs, reasons, strict=True)
        ]
        bad = [at for at, why in enumerate(reasons) if why]
        good = [at for at, why in enumerate(reasons) if not why]
        with core.lock:
            core.drop_slabs(writer, damage)
            writer.give_back([int(slots[at]) for at in bad if slabs[at] not in damage])
            writer.release(slots[bad])
        if good and not self._commit(pending.take(good)):
            again = self._commit_some(pending.take(good), [""] * len(good), {})
            for at, why in zip(good, again, strict=True):
                reasons[at] = why
        return reasons


def _checksummer(offer: Offer, sums: NDArray[np.uint64]) -> Callable[[int, int], None]:
    rows, lengths, keys = offer.addresses.tolist(), offer.nbytes.tolist(), offer.keys

    def hook(first: int, last: int) -> None:
        for at in range(first, last):
            sums[at] = page_checksum(rows[at], lengths, checksum_seed(keys[at]))

    return hook


def _settle_duplicates(keys: list[bytes], status: list[PageStatus]) -> None:
    """Give later mentions of a key in one batch the verdict of the first."""
    if len(set(keys)) == len(keys):
        return
    first: dict[bytes, PageStatus] = {}
    for at, key in enumerate(keys):
        verdict = first.setdefault(key, status[at])
        if not verdict:
            status[at] = verdict
