"""Loading pages: find their slots, check their records, read, check again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from .finder import Finder
from .payload import Places, Sums
from .reader_partition import ReaderPartition
from .record import (
    CHECKSUM_NONE,
    CHECKSUM_XXH3,
    GENERATION_WORD,
    KEY_WORDS,
    SEQUENCE_WORD,
    Words,
    as_records,
    checksum_seed,
    key_field,
    key_lengths,
)
from .sealed_engine import SealedEngine
from .slab import SlabDamagedError
from .status import ABSENT, CHANGED, CHECKSUM, LOADED, STORE_GONE, PageStatus, failed
from .writer import WriterPartition

_ATTEMPTS = 3
_LOOKS_S = (0.0002, 0.0004, 0.0008, 0.0016, 0.0032, 0.0064, 0.0128)
"""How long to wait for who publishes a record: he may have lost his processor in the midst of it."""
_CONSTANT = slice(GENERATION_WORD + 1, SEQUENCE_WORD + 1)  # words that tell one commit from another

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .core import StoreCore
    from .finder import Place
    from .partition import Partition
    from .payload import Payload


@dataclass(slots=True)
class Request:
    """Pages asked for, and the verdicts as they come in.

    Attributes
    ----------
    keys : list of bytes
    payload : Payload
    status : list of PageStatus
    missed : list of int
        Rows that were not loaded from where they were looked for; some may have been since.
    """

    keys: list[bytes]
    payload: Payload
    status: list[PageStatus]
    missed: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Found:
    """Pages of one partition: rows of the request, their slots, and their records before the read."""

    partition: Partition
    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    words: Words


class Getter:
    """The get side of an open store.

    Parameters
    ----------
    core : StoreCore
    verify_always : bool
        Check the checksum of every page.
    verify_foreign : bool
        Check the checksum of every page of another writer (the root is on a network file system).
    """

    def __init__(self, core: StoreCore, *, verify_always: bool, verify_foreign: bool) -> None:
        self._core = core
        self._finder = Finder(core)
        self._verify_always = verify_always
        self._verify_foreign = verify_foreign

    def get(self, keys: list[bytes], payload: Payload) -> list[PageStatus]:
        """Read pages to memory; one verdict a page."""
        nowhere = STORE_GONE if self._core.lost_partition() else ABSENT
        request = Request(keys, payload, [nowhere] * len(keys))
        found = self._finder.find(keys)
        self._read_all(found, request)
        if request.missed:
            self._try_other_places(found, request)
        self._core.count("get", request.status)
        return request.status

    def _read_all(self, found: list[Place], request: Request) -> None:
        """Read pages where they were found, unpin this process's own, drop those that are damaged."""
        damaged: list[tuple[Partition, list[tuple[int, bytes]]]] = []
        try:
            for partition, rows, slots in found:
                lost: list[tuple[int, bytes]] = []
                self._read_while_slabs_go(partition, rows, slots, request, lost)
                if lost:
                    damaged.append((partition, lost))
        finally:
            for partition, _, slots in found:
                if isinstance(partition, WriterPartition):
                    with self._core.lock:
                        partition.release(slots)
        if damaged:
            with self._core.lock:
                for partition, lost in damaged:
                    self._core.lose(partition, lost)

    def _try_other_places(self, found: list[Place], request: Request) -> None:
        """Read pages that were not to be had from the other places that hold them, if any."""
        tried: set[tuple[int, Partition, int]] = set()
        for _ in range(_ATTEMPTS):
            for partition, rows, slots in found:
                tried.update(
                    (row, partition, slot) for row, slot in zip(rows.tolist(), slots.tolist(), strict=True)
                )
            missed = sorted({row for row in request.missed if not request.status[row]})
            request.missed.clear()
            found = self._finder.find_again(request.keys, missed, tried)
            if not found:
                return
            self._read_all(found, request)

    def _read_while_slabs_go(
        self,
        partition: Partition,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        request: Request,
        lost: list[tuple[int, bytes]],
    ) -> None:
        """Read pages of one partition, once more where another thread let go of a slab meanwhile."""
        for _ in range(_ATTEMPTS):
            lost.clear()
            try:
                self._read(partition, rows, slots, request, lost)
            except SlabDamagedError:
                continue
            return
        request.missed += rows.tolist()
        for row in rows.tolist():
            request.status[row] = CHANGED

    def _read(
        self,
        partition: Partition,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        request: Request,
        lost: list[tuple[int, bytes]],
    ) -> None:
        """Read pages of one partition; those that turned out damaged are added to `lost` (slot, key)."""
        usable = self._usable(partition, rows, slots, request)
        order = np.argsort(slots[usable], kind="stable")
        rows, slots = rows[usable][order], slots[usable][order]
        if not len(slots):
            return
        found = _Found(partition, rows, slots, self._records(partition, slots))
        suspect = self._suspects(found)
        files, offsets = partition.locate(found.slots)
        payload, places = request.payload.take(found.rows), Places(files, offsets, partition.facts.shape)
        engine = self._core.engine_for(payload)
        check = cache(partial(_check_records, found, request.keys))
        if partition.cipher is not None:
            sealed = SealedEngine(engine, partition.cipher, as_records(found.words), found.slots, places)
            reasons = payload.move(sealed, places, None, write=False, meanwhile=check)
            wrong = sealed.wrong
        else:
            sums = _sums(found, request, suspect) if suspect.any() else None
            reasons = payload.move(engine, places, sums, write=False, meanwhile=check)
            wrong = _wrong(found, sums) if sums is not None else set()
        good = check()
        lost += self._judge(found, good, reasons, wrong, request)
        if suspect.any():
            sound = np.flatnonzero(suspect & good).tolist()
            checked = [i for i in sound if i not in wrong and not reasons[i]]
            partition.trusted[found.slots[checked]] = as_records(found.words)["sequence"][checked]
            if isinstance(partition, WriterPartition):
                partition.suspect[found.slots[checked]] = False

    def _usable(
        self, partition: Partition, rows: NDArray[np.int64], slots: NDArray[np.int64], request: Request
    ) -> NDArray[np.bool_]:
        """Tell which slots lie in undamaged slabs; drop the others' slabs."""
        damage = partition.tables.damaged(slots)
        if not damage:
            return np.ones(len(slots), np.bool_)
        self._drop_slabs(partition, damage, rows, slots, request)
        return ~np.isin(slots // partition.facts.shape.slots, list(damage))

    def _drop_slabs(
        self,
        partition: Partition,
        damage: dict[int, str],
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        request: Request,
    ) -> None:
        """Drop slabs whose files are not what they were; the pages in them are misses."""
        verdicts = {slab: failed(f"damaged: {why}") for slab, why in damage.items()}
        if isinstance(partition, ReaderPartition):
            verdicts |= dict.fromkeys(filter(partition.given_up, damage), CHANGED)
        slabs = slots // partition.facts.shape.slots
        for row, slab in zip(rows.tolist(), slabs.tolist(), strict=True):
            if slab in damage:
                request.status[row] = verdicts[slab]
                request.missed.append(row)
        with self._core.lock:
            self._core.drop_slabs(partition, damage)

    def _records(self, partition: Partition, slots: NDArray[np.int64]) -> Words:
        """Copy records at a moment when none of them is being published, as far as that can be had."""
        if isinstance(partition, WriterPartition):
            with self._core.lock:  # access times and pins are published under it
                return partition.tables.gather(slots)
        words = partition.tables.gather(slots)
        for wait_s in _LOOKS_S:
            if not (words[:, GENERATION_WORD] & 1).any():
                break
            time.sleep(wait_s)
            words = partition.tables.gather(slots)
        return words

    def _suspects(self, found: _Found) -> NDArray[np.bool_]:
        """Tell which pages are verified as they are read: those that this process has not seen whole yet."""
        records = as_records(found.words)
        stored: NDArray[np.bool_] = records["algorithm"] != CHECKSUM_NONE
        if not self._verify_always:
            stored &= found.partition.trusted[found.slots] != records["sequence"]
        return stored | self._doubted(found)

    def _doubted(self, found: _Found) -> NDArray[np.bool_]:
        """Tell which pages are not served without a checksum, or whatever this process has seen of them."""
        partition = found.partition
        if isinstance(partition, WriterPartition):
            marked: NDArray[np.bool_] = partition.suspect[found.slots]
            return marked
        doubt = isinstance(partition, ReaderPartition) and (partition.suspect or self._verify_foreign)
        return np.full(len(found.slots), doubt)

    def _judge(
        self,
        found: _Found,
        good: NDArray[np.bool_],
        reasons: list[str],
        wrong: set[int],
        request: Request,
    ) -> list[tuple[int, bytes]]:
        """Turn what was read into verdicts; return the pages (slot, key) that turned out damaged.

        I/O first, then a record that was not `good` before the read, or is not the same after it, then the
        checksum.
        """
        partition, status = found.partition, request.status
        same = good & self._unchanged(found)
        rows, slots = found.rows.tolist(), found.slots.tolist()
        lost: list[tuple[int, bytes]] = []
        if not wrong and same.all() and not any(reasons):
            for row in rows:
                status[row] = LOADED
            return lost
        if isinstance(partition, WriterPartition):  # nobody else may change our records
            lost += [(slots[i], request.keys[rows[i]]) for i in np.flatnonzero(~good).tolist()]
        for i, (row, slot, unchanged) in enumerate(zip(rows, slots, same.tolist(), strict=True)):
            if reasons[i]:
                status[row] = failed(reasons[i])
            elif not unchanged:
                status[row] = CHANGED
            elif i in wrong:
                status[row] = CHECKSUM
                lost.append((slot, request.keys[row]))
            else:
                status[row] = LOADED
        request.missed += [row for row in rows if not status[row]]
        if lost and isinstance(partition, ReaderPartition):
            partition.report(f"{len(lost)} damaged pages")
        if any(reasons):
            self._distrust(found, reasons, request, lost)
        return lost

    def _distrust(
        self, found: _Found, reasons: list[str], request: Request, lost: list[tuple[int, bytes]]
    ) -> None:
        """Drop what an engine could not read because a slab is not the file that it was."""
        rows, slots = found.rows.tolist(), found.slots.tolist()
        bad = [i for i, reason in enumerate(reasons) if reason.startswith("damaged")]
        if isinstance(found.partition, WriterPartition):  # which looks again before it drops anything
            lost += [(slots[i], request.keys[rows[i]]) for i in bad]
        elif bad:
            size = found.partition.facts.shape.slots
            damage = {slots[i] // size: reasons[i].partition(": ")[2] for i in bad}
            self._drop_slabs(found.partition, damage, found.rows, found.slots, request)

    def _unchanged(self, found: _Found) -> NDArray[np.bool_]:
        """Tell which records are still those of before the read."""
        tables, before = found.partition.tables, found.words
        if tables.damaged(found.slots):
            return np.zeros(len(found.slots), np.bool_)
        same: NDArray[np.bool_] = before[:, GENERATION_WORD] == tables.generations(found.slots)
        if not same.all():
            # A record re-published for its access time alone keeps its commit sequence and its key.
            after = self._records(found.partition, found.slots)
            again = found.partition.committed(as_records(after))
            same |= again & (before[:, _CONSTANT] == after[:, _CONSTANT]).all(axis=1)
        return same


def _check_records(found: _Found, keys: list[bytes]) -> NDArray[np.bool_]:
    """Tell which records are stable, committed, whole, and of the key asked for."""
    wanted = list(map(keys.__getitem__, found.rows.tolist()))
    good = found.partition.committed(as_records(found.words))
    good &= (found.words[:, KEY_WORDS] == key_field(wanted).view(np.uint64)).all(axis=1)
    good &= as_records(found.words)["key_nbytes"] == key_lengths(wanted)
    return good


def _sums(found: _Found, request: Request, suspect: NDArray[np.bool_]) -> Sums:
    """Ask for the checksums of suspect pages."""
    wanted, rows = suspect.tolist(), found.rows.tolist()
    seeds = [
        checksum_seed(request.keys[row]) if asked else 0 for row, asked in zip(rows, wanted, strict=True)
    ]
    return Sums(seeds, wanted, np.zeros(len(rows), np.uint64))


def _wrong(found: _Found, sums: Sums) -> set[int]:
    """Return the pages whose checksum, if it was asked for, is not their record's."""
    records = as_records(found.words)
    bad = (records["algorithm"] != CHECKSUM_XXH3) | (records["checksum"] != sums.values)
    return set(np.flatnonzero(bad & np.array(sums.wanted)).tolist())
