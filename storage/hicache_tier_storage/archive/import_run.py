"""An import under way."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier_storage.access import Owners
from hicache_tier_storage.asked_capacity import check_capacity, parse_capacity
from hicache_tier_storage.bounded import BoundedStore
from hicache_tier_storage.capacity import partition_paths
from hicache_tier_storage.opening import open_store
from hicache_tier_storage.posix import PosixEngine
from hicache_tier_storage.root_check import check_root

from .batches import BatchReader
from .choice import Choice, stored_units
from .places import check_parent
from .pool import Workers
from .room import PretendedRoom, room_pages
from .staging import StagedPages
from .units import RowFinder, Units, heads_of_units, units_of
from .warming import read_back

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from hicache_tier_storage import PageStore
    from hicache_tier_storage.encryption import EncryptionKey

    from .import_report import ImportReport
    from .targets import Target

_BATCH_NBYTES = 16 << 20
_WRITE_NBYTES = 512 << 10
_IN_FLIGHT = 2


class ImportRun:
    """An import under way: targets one after another, batches of each by several threads."""

    def __init__(
        self,
        report: ImportReport,
        root: Path,
        *,
        capacity: int | str | None,
        tenants: Sequence[str],
        threads: int,
        memory: int,
        progress: Callable[[int, int], None] | None,
        key: EncryptionKey | None = None,
    ) -> None:
        self._key = key
        self._report = report
        self._root = root
        self._capacity = capacity
        self._tenants = tenants
        self._threads = threads
        self._memory = memory
        self._progress = progress
        self._done = self._total = 0
        self._room: PretendedRoom | None = None

    def all(self, targets: list[Target]) -> None:
        """Import every target."""
        for target in targets:
            target.identity = replace(target.identity, encrypted=self._key is not None)
        self._total = sum(target.nbytes for target in targets)
        choice = Choice(targets, self._tenants)
        if self._report.dry_run:
            self._check(targets)
            self._room = PretendedRoom(self._root, parse_capacity(self._capacity, self._root))
        for target in targets:
            self._run(target, choice)

    def _run(self, target: Target, choice: Choice) -> None:
        before = (self._report.imported, self._report.already_stored)
        store = self._open(target)
        with nullcontext() if store is None else store:
            if store is None or self._room is not None:
                self._pretend(target, store, choice)
            else:
                self._fill(target, store, choice)
                self._read_back(target, store)
        name = target.identity
        self._report.parts.append(
            {
                "namespace": name.namespace,
                "rank": name.rank,
                "pool": name.pool,
                "imported": self._report.imported - before[0],
                "already_stored": self._report.already_stored - before[1],
            }
        )

    def _check(self, targets: list[Target]) -> None:
        """Refuse what making the stores would refuse; a dry run makes none."""
        check_parent(self._root)
        Owners.SELF.check(self._root)
        capacity_nbytes = parse_capacity(self._capacity, self._root)
        for target in targets:
            check_capacity(target.identity.geometry.page_nbytes, capacity_nbytes)
        check_root(self._root, create=True)

    def _open(self, target: Target) -> PageStore | None:
        """Open the target's store; None where a dry run finds none yet, or there is nothing for it."""
        dry = self._report.dry_run
        if dry and not (self._root.is_dir() and next(partition_paths(self._root), None)):
            return None
        if not any(units.keys for units in units_of(target, self._tenants)):
            return None
        name = target.identity
        return open_store(
            self._root,
            name.geometry,
            target.shape.layout,
            model=name.model,
            revision=name.revision,
            tenant=name.tenant,
            adapter=name.adapter,
            scales=name.scales,
            rope=name.rope,
            key_algorithm=name.key_algorithm,
            tp=(name.tp.rank, name.tp.size),
            pp=(name.pp.rank, name.pp.size),
            cp=(name.cp.rank, name.cp.size),
            pool=name.pool,
            pools=name.pools,
            capacity_bytes=self._capacity,
            engine=PosixEngine(direct=False, threads=1, write_nbytes=_WRITE_NBYTES),
            read_only=dry,
            encryption=self._key,
        )

    def _pretend(self, target: Target, store: PageStore | None, choice: Choice) -> None:
        """Count what would be imported."""
        before, chosen = self._report.imported, None
        if self._room is not None:
            chosen = choice.of(target, store, self._room.pages(target.identity))
        for units in units_of(target, self._tenants):
            self._refuse_units(target, units)
            self._report.imported += len(self._wanted(target, store, units, chosen).keys)
        if self._room is not None:
            self._room.take(target.identity, self._report.imported - before)

    def _fill(self, target: Target, store: PageStore, choice: Choice) -> None:
        finders = [RowFinder(piece.part) for piece in target.pieces[1:]]
        batch = max(1, _BATCH_NBYTES // _unit_nbytes(target))
        on_workers, deadline_s = store, None
        if isinstance(store, BoundedStore):  # workers are watched, and write what their cores have in cache
            on_workers, deadline_s = store.on_this_thread, store.deadline_s
        writer = BatchWriter(target, on_workers, finders)
        chosen = choice.of(target, store, room_pages(store))
        with Workers(1, self._threads, polite=False, deadline_s=deadline_s) as workers:
            for units in units_of(target, self._tenants):
                self._refuse_units(target, units)
                wanted = self._wanted(target, store, units, chosen)
                for part in wanted.batches(batch):
                    while len(workers) >= _IN_FLIGHT * self._threads:
                        self._collect(target, workers)
                    workers.submit(writer.write, part, workers.stopped)
            while len(workers):
                self._collect(target, workers)

    def _read_back(self, target: Target, store: PageStore) -> None:
        """Have pages in memory, as many as it takes."""
        if self._memory > 0:
            pages = read_back(target, store, self._tenants, self._memory)
            self._report.host_pages += pages
            self._report.host_nbytes += pages * store.geometry.page_nbytes
            self._memory -= pages * store.geometry.page_nbytes

    def _wanted(
        self, target: Target, store: PageStore | None, units: Units, chosen: NDArray[np.uint64] | None
    ) -> Units:
        """Leave out what the store has, and what there is no room for."""
        stored = stored_units(store, units)
        self._report.already_stored += int(stored.sum()) * units.pages_each
        self._step(target, int(stored.sum()) * units.pages_each)
        if chosen is None:
            return units.take(~stored)
        heads, _ = heads_of_units(units)
        fits = np.isin(heads, chosen)
        each = units.pages_each
        for at in np.flatnonzero(~stored & ~fits).tolist():
            for key in units.keys[at * each : (at + 1) * each]:
                self._report.refuse(str(target), key, "capacity")
        return units.take(~stored & fits)

    def _collect(self, target: Target, workers: Workers) -> None:
        for outcome in workers.results():
            self._report.imported += outcome.imported
            self._report.already_stored += outcome.already_stored
            self._report.nbytes += outcome.imported * target.shape.geometry.page_nbytes
            self._refuse(target, outcome.refused)
            self._step(target, outcome.pages)

    def _refuse_units(self, target: Target, units: Units) -> None:
        """Enter what makes no page; as one where that is all of a part, for one reason."""
        reasons = {reason for _, reason in units.refused}
        if target.rekeyed and not units.keys and len(reasons) == 1:
            self._report.refuse(str(target), None, reasons.pop(), len(units.refused))
        else:
            self._refuse(target, units.refused)

    def _refuse(self, target: Target, refused: list[tuple[bytes, str]]) -> None:
        for key, reason in refused:
            self._report.refuse(str(target), key, reason)

    def _step(self, target: Target, pages: int) -> None:
        self._done += pages * target.shape.geometry.page_nbytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


def _unit_nbytes(target: Target) -> int:
    old, new = target.pieces[0].part.facts.geometry, target.shape.geometry
    return max(
        new.page_nbytes * max(1, old.page_tokens // new.page_tokens),
        old.page_nbytes * max(1, new.page_tokens // old.page_tokens),
    )


@dataclass(slots=True)
class Outcome:
    """What became of a batch."""

    pages: int
    imported: int = 0
    already_stored: int = 0
    refused: list[tuple[bytes, str]] = field(default_factory=list)


class BatchWriter:
    """Reads, checks, converts and stores batches of one target; each thread has its own memory."""

    def __init__(self, target: Target, store: PageStore, finders: list[RowFinder]) -> None:
        self._target = target
        self._store = store
        self._reader = BatchReader(target, finders)

    def write(self, units: Units, stopped: Callable[[], bool]) -> Outcome:
        """Bring a batch into the store."""
        outcome = Outcome(len(units.keys))
        if stopped():
            return outcome
        pages, reasons = self._reader.read(units)
        outcome.refused = [(key, why) for key, why in zip(units.keys, reasons, strict=True) if why]
        good = [at for at, why in enumerate(reasons) if not why]
        if not good:
            return outcome
        host = StagedPages(self._target.shape.geometry, self._target.shape.layout, pages)
        keys, parents = [units.keys[at] for at in good], [units.parents[at] for at in good]
        for key, status in zip(keys, self._store.put(keys, host, good, parents=parents), strict=True):
            if not status:
                outcome.refused.append((key, status.reason))
            elif status.reason == "stored":
                outcome.imported += 1
            else:
                outcome.already_stored += 1
        return outcome
