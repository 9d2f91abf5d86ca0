"""Storing pages: allocate slots, write payloads, publish records."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.ma  # np.unique would import it at its first call, when a fork may be under way

from hicache_tier.errors import InvalidArgumentError

from .keys import normalise_keys
from .payload import Places, Sums
from .publisher import complete
from .record import (
    CHECKSUM_XXH3,
    FLAG_FROM_GPU,
    FLAG_PINNED,
    checksum_seed,
    key_field,
    key_lengths,
    new_records,
)
from .sealed_engine import SealedEngine
from .slab import SlabDamagedError
from .status import ALREADY_STORED, STORED, PageStatus, failed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from .core import StoreCore
    from .keys import PageKey
    from .payload import Payload
    from .writer import WriterPartition

_WAIT_S = 30.0  # for another call that stores the same page
_WAIT_SLICE_S = 1.0


@dataclass(slots=True)
class Offer:
    """Pages offered for storing: one row each.

    Attributes
    ----------
    keys : list of bytes
    parent_keys : sequence of bytes
        Keys of the parents, those that there are.
    parents : uint64 [n]
        First 8 bytes of each page's parent's key as stored, 0 at the root.
    payload : Payload
    """

    keys: list[bytes]
    parent_keys: Sequence[bytes]
    parents: NDArray[np.uint64]
    payload: Payload

    @classmethod
    def of(cls, keys: list[bytes], parents: Sequence[PageKey | None] | None, payload: Payload) -> Offer:
        """Offer pages; raises `InvalidArgumentError` where there is not one parent, or None, for each."""
        heads = np.zeros(len(keys), np.uint64)
        if parents is None:
            return cls(keys, [], heads, payload)
        if len(parents) != len(keys):
            raise InvalidArgumentError(f"{len(keys)} keys need as many parents, got {len(parents)}.")
        names = normalise_keys([parent for parent in parents if parent is not None])
        heads[[parent is not None for parent in parents]] = key_field(names).view("<u8")[:, 0]
        return cls(keys, names, heads, payload)

    def take(self, rows: list[int]) -> Offer:
        """Return the chosen rows; `parent_keys` are those of all."""
        if len(rows) == len(self.keys):
            return self
        keys = [self.keys[i] for i in rows]
        return Offer(keys, self.parent_keys, self.parents[rows], self.payload.take(rows))


@dataclass(slots=True, eq=False)
class Claim:
    """What one call has taken for itself, to be let go of however it ends.

    Attributes
    ----------
    rows, elsewhere : list of int
        Rows to store; rows that are being stored now, by another call or by an earlier row of this one.
    keys : set of bytes
        Keys of the rows to store, while the claim is entered in `StoreCore.writing`.
    kept : slot numbers, or None
        The pages of the batch, and their parents, that are stored already: pinned, so that none of them is
        evicted for the batch.
    over : bool
        Whether the call has ended.
    """

    rows: list[int] = field(default_factory=list)
    elsewhere: list[int] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)
    kept: NDArray[np.int64] | None = None
    over: bool = False


@dataclass(slots=True)
class _Pending:
    """Pages on their way to disk: allocated slots, what goes there, and their records.

    `begun` says whether bytes may be under way: from then on slots are given back by verdict alone;
    `complete` whether the records are ready to be published.
    """

    slots: NDArray[np.int64]
    offer: Offer
    records: NDArray[np.void]
    begun: bool = False
    complete: bool = False

    def take(self, rows: list[int]) -> _Pending:
        return _Pending(self.slots[rows], self.offer.take(rows), self.records[rows])


class Putter:
    """The put side of an open store.

    Parameters
    ----------
    core : StoreCore
    writer : WriterPartition
    checksums : bool
        Whether a checksum is stored with each page that is not encrypted.
    """

    def __init__(self, core: StoreCore, writer: WriterPartition, *, checksums: bool) -> None:
        self._core = core
        self._writer = writer
        self._checksums = checksums

    def put(self, offer: Offer, *, pin: bool) -> list[PageStatus]:
        """Store what is not stored yet; one verdict a page."""
        status = self._put(offer, time.monotonic() + _WAIT_S, pin=pin)
        self._core.count("put", status)
        return status

    def _put(self, offer: Offer, until_s: float, *, pin: bool) -> list[PageStatus]:
        """Store what nobody else stores; where that fails them, what they have left."""
        core = self._core
        status: list[PageStatus] = [ALREADY_STORED] * len(offer.keys)
        claim = Claim()
        core.lost_partition()
        try:
            with core.lock:
                self._claim(offer, claim, pin=pin)
                slots = self._allocate(len(claim.rows)) if claim.rows else np.empty(0, np.int64)
                verdict = failed(self._writer.no_room)
                sequence = self._writer.sequence + 1
                self._writer.sequence += len(slots)
            refused, todo = claim.rows[len(slots) :], claim.rows[: len(slots)]
            for at in refused:
                status[at] = verdict
            if todo:
                self._store(slots, todo, offer, sequence, status, pin=pin)
        finally:
            claim.over = True  # whatever interrupts what follows, nobody waits for these pages any more
            self._let_go(claim)
        if claim.elsewhere:
            left = self._await(claim, offer.keys, status, until_s, pin=pin)
            if left and time.monotonic() < until_s:
                again = self._put(offer.take(left), until_s, pin=pin)
                for at, verdict in zip(left, again, strict=True):
                    status[at] = verdict
            _settle_duplicates(offer.keys, status)  # a later mention of a new key is stored elsewhere
        return status

    def _claim(self, offer: Offer, claim: Claim, *, pin: bool) -> None:
        """Choose the rows that this call stores; what is stored already becomes recent (and pinned).

        What is taken is written down in `claim` at once, with no call in between: whatever is raised here, a
        signal's exception too, finds it there.
        """
        core, writer, own = self._core, self._writer, self._core.index
        known: list[int] = []
        fresh = self._all_new(offer.keys, pin=pin)
        if fresh:
            claim.rows = list(range(len(offer.keys)))
        else:
            fresh = self._choose(offer.keys, claim, known, pin=pin)
        if known:
            slots = np.array(known, np.int64)
            core.touch(slots)
            if pin:
                writer.pin_more(slots)
        if not fresh:
            return
        known += [own[parent] for parent in offer.parent_keys if parent in own]
        kept = np.unique(np.array(known, np.int64))
        claim.keys, writing = fresh, core.writing
        writing += [claim]
        writer.pins[kept] += 1
        claim.kept = kept

    def _all_new(self, keys: list[bytes], *, pin: bool) -> set[bytes]:
        """Return the keys of a batch where `_choose` would choose every row; else none.

        No Python code runs for each key: most batches are such.
        """
        core, fresh = self._core, set(keys)
        tables: list[Mapping[bytes, object]] = [core.index] if pin else [core.index, core.foreign.index]
        new = (
            len(fresh) == len(keys)
            and all(table.keys().isdisjoint(fresh) for table in tables)
            and all(other.over or other.keys.isdisjoint(fresh) for other in core.writing)
        )
        return fresh if new else set()

    def _choose(self, keys: list[bytes], claim: Claim, known: list[int], *, pin: bool) -> set[bytes]:
        """Sort rows into a claim, and the slots of pages that are here into `known`; return the new keys."""
        own, foreign = self._core.index, self._core.foreign.index
        fresh: set[bytes] = set()
        for at, key in enumerate(keys):
            if key in own:
                known.append(own[key])
            elif key in fresh or self._written_now(key):
                claim.elsewhere.append(at)
            elif pin or key not in foreign:  # another writer's page cannot be kept: it is stored here as well
                fresh.add(key)
                claim.rows.append(at)
        return fresh

    def _let_go(self, claim: Claim) -> None:
        """Undo a claim, and tell those who wait for its pages."""
        if not claim.keys:
            return
        core = self._core
        with core.lock:
            kept, claim.kept = claim.kept, None
            if kept is not None:
                self._writer.release(kept)
            core.writing[:] = [other for other in core.writing if not other.over]
            core.written.notify_all()

    def _store(
        self,
        slots: NDArray[np.int64],
        rows: list[int],
        offer: Offer,
        sequence: int,
        status: list[PageStatus],
        *,
        pin: bool,
    ) -> None:
        """Write rows to the slots allocated for them, and note the verdicts."""
        pending = _Pending(slots, offer.take(rows), new_records(len(slots)))
        try:
            reasons = self._write(pending, sequence, pin=pin)
        except BaseException:
            with self._core.lock:
                if pending.begun:
                    self._writer.stranded += len(slots)  # still pinned, as where an engine says `timeout`
                else:
                    self._writer.give_back(slots.tolist())
                    self._writer.release(slots)
            raise
        verdicts = [STORED] * len(rows)
        if any(reasons):
            verdicts = [failed(reason) if reason else STORED for reason in reasons]
        if len(rows) == len(status):
            status[:] = verdicts
        else:
            for at, verdict in zip(rows, verdicts, strict=True):
                status[at] = verdict

    def _await(
        self, claim: Claim, keys: list[bytes], status: list[PageStatus], until_s: float, *, pin: bool
    ) -> list[int]:
        """Wait for other calls that store these pages; return the rows that they have left."""
        core, rows = self._core, claim.elsewhere
        with core.lock:
            while any(self._written_now(keys[at]) for at in rows):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    break
                core.written.wait(min(left_s, _WAIT_SLICE_S))
            missing = [at for at in rows if keys[at] not in core.index and keys[at] not in core.foreign.index]
            for at in missing:
                status[at] = failed("lost_race")
            if pin:
                there = [core.index[keys[at]] for at in rows if keys[at] in core.index]
                self._writer.pin_more(np.array(there, np.int64))
            return [at for at in missing if keys[at] not in claim.keys and not self._written_now(keys[at])]

    def _written_now(self, key: bytes) -> bool:
        return any(key in other.keys and not other.over for other in self._core.writing)

    def _allocate(self, count: int) -> NDArray[np.int64]:
        """Allocate on undamaged slabs; evicted pages leave the index."""
        core, writer = self._core, self._writer
        while True:
            slots, evicted = writer.allocate(count)
            core.forget(evicted)
            damage = writer.tables.damaged(slots)
            if not damage:
                return slots
            bad = np.isin(slots // writer.facts.shape.slots, list(damage))
            writer.give_back(slots[~bad].tolist())
            writer.release(slots)
            core.drop_slabs(writer, damage)

    def _write(self, pending: _Pending, sequence: int, *, pin: bool) -> list[str]:
        """Write payloads and records of allocated slots; "" or a reason for each."""
        core, writer = self._core, self._writer
        slots, offer, records = pending.slots, pending.offer, pending.records
        try:
            odd = writer.tables.mark_writing(slots)
            files, offsets = writer.locate(slots)
        except SlabDamagedError:
            return self._commit_some(pending, ["slab_dropped"] * len(slots), {})
        payload, places = offer.payload, Places(files, offsets, writer.facts.shape)
        sums, engine = None, core.engine_for(offer.payload)

        @cache  # once, whoever comes to it first
        def describe() -> None:
            self._describe(records, offer, sequence, pin=pin)
            if writer.cipher is None and (sums is None or sums.known):
                complete(records, odd)
                pending.complete = True

        if writer.cipher is not None:
            describe()
            writer.cipher.prepare(records, odd)
            engine = SealedEngine(engine, writer.cipher, records, slots, places)
        elif self._checksums:
            records["algorithm"] = CHECKSUM_XXH3
            seeds = list(map(checksum_seed, offer.keys))
            sums = Sums(seeds, [True] * len(seeds), records["checksum"])
        pending.begun = True
        reasons = payload.move(engine, places, sums, write=True, meanwhile=describe)
        describe()
        if not pending.complete:
            complete(records, odd)  # with what is known only now
        damage = writer.tables.damaged(slots)
        if damage or any(reasons) or not self._commit(pending):
            return self._commit_some(pending, reasons, damage)
        return reasons

    def _describe(self, records: NDArray[np.void], offer: Offer, sequence: int, *, pin: bool) -> None:
        """Fill in what records say of pages however their bytes are stored."""
        writer, count = self._writer, len(offer.keys)
        now_ns = time.time_ns()
        records["key"] = key_field(offer.keys)
        records["key_nbytes"] = key_lengths(offer.keys)
        records["sequence"] = np.arange(sequence, sequence + count, dtype=np.uint64)
        records["valid_nbytes"] = writer.facts.shape.page_nbytes
        records["epoch"] = writer.state.epoch
        records["created_ns"] = now_ns
        records["access_s"] = now_ns // 1_000_000_000
        records["parent"] = offer.parents
        records["tokens"] = self._core.geometry.page_tokens
        records["flags"] = FLAG_PINNED * pin | FLAG_FROM_GPU * (offer.payload.device is not None)

    def _commit(self, pending: _Pending) -> bool:
        """Publish and enter pages; False, and nothing done, where their slab or the partition is gone."""
        core, writer, slots = self._core, self._writer, pending.slots
        if writer.is_gone:
            return False
        try:
            writer.records.publish_complete(slots, pending.records)
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
        if core.lost_partition():
            damage, reasons = {}, [why if why.startswith("timeout") else "store_gone" for why in reasons]
        else:
            damage |= {slab: "it was dropped" for slab in set(slabs) if slab not in writer.slabs}
        for slab, why in zip(slabs, reasons, strict=True):
            if why.startswith("damaged"):
                damage.setdefault(slab, why.partition(": ")[2])
        reasons = [
            f"damaged: {damage[slab]}" if slab in damage else why
            for slab, why in zip(slabs, reasons, strict=True)
        ]
        late = sum(why.startswith("timeout") for why in reasons)
        bad = [at for at, why in enumerate(reasons) if why and not why.startswith("timeout")]
        good = [at for at, why in enumerate(reasons) if not why]
        with core.lock:
            core.drop_slabs(writer, damage)
            writer.give_back([int(slots[at]) for at in bad if slabs[at] not in damage])
            writer.release(slots[bad])
            writer.stranded += late  # still pinned: what is under way must not land in another page's slot
        if good and not self._commit(pending.take(good)):
            again = self._commit_some(pending.take(good), [""] * len(good), {})
            for at, why in zip(good, again, strict=True):
                reasons[at] = why
        return reasons


def _settle_duplicates(keys: list[bytes], status: list[PageStatus]) -> None:
    """Give later mentions of a key in one batch the verdict of the first."""
    if len(set(keys)) == len(keys):
        return
    first: dict[bytes, PageStatus] = {}
    for at, key in enumerate(keys):
        verdict = first.setdefault(key, status[at])
        if not verdict:
            status[at] = verdict
