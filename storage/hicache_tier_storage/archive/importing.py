"""`import_archive`: pages of an archive into a store, each of them checked, converted where asked for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_tier_storage.opening import open_store

from .batches import BatchReader
from .pool import Workers, default_threads
from .ranking import Ranking
from .reader import open_archive
from .room import room_pages, stated_capacity
from .staging import StagedPages
from .targets import Conversion, plan_targets
from .units import RowFinder, Units, heads_of_units, units_of
from .warming import free_nbytes, read_back

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from hicache_tier_storage import PageStore

    from .reader import Archive
    from .targets import Target

_BATCH_NBYTES = 4 << 20  # with what it is converted to, it stays in the cache of a core
_MOST_DETAILS = 1000
_IN_FLIGHT = 2


@dataclass(slots=True)
class ImportReport:
    """What an import did, or would do. Pages are those of the store, after conversion.

    Attributes
    ----------
    source : str
    root : str
    imported, already_stored : int
    nbytes : int
        Payload of the pages imported.
    refused : dict
        Pages of the archive that made none, by reason.
    details : list of dict
        `{part, key, reason}` of the first 1000 of them; `details_omitted` counts the rest.
    parts : list of dict
        `{namespace, rank, pool, imported, already_stored}` of the store.
    host_pages, host_nbytes : int
        Pages that were read back into memory, and their payload.
    dry_run : bool
    seconds : float
    """

    source: str
    root: str
    imported: int = 0
    already_stored: int = 0
    nbytes: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    details: list[dict[str, str]] = field(default_factory=list)
    details_omitted: int = 0
    parts: list[dict[str, Any]] = field(default_factory=list)
    host_pages: int = 0
    host_nbytes: int = 0
    dry_run: bool = False
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; sizes are called `bytes`."""
        names = {"nbytes": "bytes", "host_nbytes": "host_bytes"}
        return {names.get(name, name): getattr(self, name) for name in self.__slots__}

    def refuse(self, part: str, key: bytes | None, reason: str, count: int = 1) -> None:
        """Enter a page, or all pages of a part."""
        kind = reason.partition(":")[0]
        self.refused[kind] = self.refused.get(kind, 0) + count
        if len(self.details) < _MOST_DETAILS:
            name = "all" if key is None else key.hex()
            self.details.append({"part": part, "key": name, "reason": reason})
        else:
            self.details_omitted += count


def import_archive(
    source: str | Path | Archive,
    root: str | os.PathLike[str],
    *,
    conversion: Conversion | None = None,
    tenants: Sequence[str] = (),
    namespaces: Sequence[str] = (),
    capacity_bytes: int | str | None = None,
    threads: int | None = None,
    to_host: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ImportReport:
    """Bring the pages of an archive into the store at `root`, which may be new, or in use by a server.

    Each page is checked against its checksum before it is stored; pages that the store has are skipped, and
    none of those it has is pushed out. Where room is short, whole prefixes come first, those used last.

    Parameters
    ----------
    source : path, str or Archive
    root : path
    conversion : Conversion, optional
        What the pages are to become.
    tenants : sequence of str
        Salts of the tenants whose pages are wanted; an archive holds digests only.
    namespaces : sequence of str
        First digits of the namespaces to import; all where there are none.
    capacity_bytes : int or str, optional
        Cap on the root; as its partitions state, or that of `open_store` for a new one.
    threads : int, optional
    to_host : bool
        Then read the pages back through the store, so that they lie in the memory of the machine.
    dry_run : bool
        Only say what would be imported; payloads are not read.
    progress : callable (done, total), optional
        Told bytes of payload of the store.

    Returns
    -------
    ImportReport

    Raises
    ------
    InvalidArgumentError
        For a wrong argument; nothing was touched.
    NotAnArchiveError, FormatVersionError, ArchiveError
        Where the archive is not what an export writes; names the first fault. Nothing was touched.
    StoreError
        Where the store cannot be opened.
    """
    began_s = time.monotonic()
    wanted = conversion or Conversion()
    opened = open_archive(source) if isinstance(source, str | Path) else source
    try:
        report = ImportReport(opened.place.text, str(root), dry_run=dry_run)
        plan = plan_targets(opened, wanted, tenants, namespaces)
        for part, reason in plan.refused:
            report.refuse(str(part.facts.name), None, reason, part.facts.pages)
        path = Path(root).absolute()
        cap = stated_capacity(path) if capacity_bytes is None and path.is_dir() else capacity_bytes
        memory = free_nbytes() if to_host and not dry_run else 0
        run = _Import(
            report,
            path,
            capacity=cap,
            tenants=tenants,
            threads=threads or default_threads(),
            memory=memory,
            progress=progress,
        )
        run.expect(plan.targets)
        for target in plan.targets:
            run.run(target)
    finally:
        if opened is not source:
            opened.close()
    report.seconds = time.monotonic() - began_s
    return report


class _Import:
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
    ) -> None:
        self._report = report
        self._root = root
        self._capacity = capacity
        self._tenants = tenants
        self._threads = threads
        self._memory = memory
        self._progress = progress
        self._done = self._total = 0

    def expect(self, targets: list[Target]) -> None:
        """Say how much there is to do."""
        for target in targets:
            facts = target.pieces[0].part.facts
            tokens = facts.pages * facts.geometry.page_tokens
            geometry = target.shape.geometry
            self._total += tokens * geometry.page_nbytes // geometry.page_tokens

    def run(self, target: Target) -> None:
        """Import one target."""
        before = (self._report.imported, self._report.already_stored)
        store = self._open(target)
        if store is None:
            self._pretend(target)
        else:
            with store:
                self._fill(target, store)
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

    def _open(self, target: Target) -> PageStore | None:
        """Open the target's store; None for a dry run where there is no such store yet."""
        dry = self._report.dry_run
        if dry and not (self._root / target.identity.namespace).is_dir():
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
            io_mode="buffered",
            engine="posix",
            threads=self._threads,
            read_only=dry,
        )

    def _pretend(self, target: Target) -> None:
        for units in units_of(target, self._tenants):
            self._report.imported += len(units.keys)
            self._refuse(target, units.refused)

    def _fill(self, target: Target, store: PageStore) -> None:
        finders = [RowFinder(piece.part) for piece in target.pieces[1:]]
        batch = max(1, _BATCH_NBYTES // _unit_nbytes(target))
        writer = BatchWriter(target, store, finders)
        room = None if self._report.dry_run else room_pages(store)
        chosen = self._choice(target, store, room)
        with Workers(1, self._threads, polite=False) as workers:
            for units in units_of(target, self._tenants):
                self._refuse(target, units.refused)
                wanted = self._wanted(target, store, units, chosen)
                if self._report.dry_run:
                    self._report.imported += len(wanted.keys)
                    continue
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

    def _choice(self, target: Target, store: PageStore, room: int | None) -> NDArray[np.uint64] | None:
        """Return the heads of the units to take where there is no room for all; None where there is."""
        if room is None:
            return None
        columns: list[tuple[NDArray[np.uint64], ...]] = []
        missing, each = 0, 1
        for units in units_of(target, self._tenants):
            each = units.pages_each
            fresh = ~_stored(store, units)
            missing += int(fresh.sum()) * each
            columns.append((*heads_of_units(units), units.scores, fresh.astype(np.uint64)))
        if missing <= room:
            return None
        heads, parents, scores, fresh_ = (np.concatenate(column) for column in zip(*columns, strict=True))
        ranking = Ranking.of(heads, parents, scores, fresh_.astype(np.int64) * each)
        return Ranking.chosen([ranking], room)[0]

    def _wanted(
        self, target: Target, store: PageStore, units: Units, chosen: NDArray[np.uint64] | None
    ) -> Units:
        """Leave out what the store has, and what there is no room for."""
        stored = _stored(store, units)
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


def _stored(store: PageStore, units: Units) -> NDArray[np.bool_]:
    """Tell for each unit whether the store has all of its pages."""
    there = np.array(store.contains(units.keys), np.bool_).reshape(len(units), units.pages_each)
    every: NDArray[np.bool_] = np.logical_and.reduce(there, axis=1)
    return every


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
