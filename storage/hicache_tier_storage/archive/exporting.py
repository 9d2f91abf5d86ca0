"""`export_archive`: a store, or some of its pages, as an ordinary Zarr archive."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.errors import InvalidArgumentError, StoreError
from hicache_tier.keywords import named_options
from hicache_tier_storage.encryption import EncryptionKey

from .candidates import Candidates, key_names, list_pages
from .codecs import Codec
from .destination import check_destination, open_destination
from .documents import shard_pages
from .errors import ArchiveError, ArchiveExistsError
from .export_report import ExportReport
from .filling import Filled, PageSource, fill
from .manifest import PartFacts, manifest_document
from .part_writer import PartWriter
from .places import Place
from .pool import Workers, default_threads
from .prompts import keys_of_prompts
from .published import PublishedShards
from .selection import Selection, check_namespaces, limit
from .shard import Draft, merged
from .stores import check_keys, store_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .destination import Destination
    from .stores import PartSource

_IN_FLIGHT = 2  # calls a worker
_GOES_ON = "what was written stays, and the same export goes on from there"
_REST = 3.0  # behind a server that writes: three quarters of the time


@named_options
def export_archive(
    root: str | os.PathLike[str],
    destination: str | Path,
    *,
    selection: Selection | None = None,
    codec: Codec | str = Codec.NONE,
    processes: int = 1,
    threads: int | None = None,
    polite: bool | None = None,
    overwrite: bool = False,
    sync: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
    encryption: EncryptionKey | str | os.PathLike[str] | None = None,
) -> ExportReport:
    """Write the pages of the store at `root` to an archive; the store may be in use, and is not changed.

    Where no page is wanted no archive is made, and the report counts none.

    The archive holds pages that were committed when the export began, each checked against its checksum as
    it is copied. Those that the store gives up meanwhile are left out. An export that was stopped, by Ctrl-C
    or otherwise, goes on where it was when it is called again with the same options.

    Parameters
    ----------
    root : path
    destination : path or str
        A folder, a path that ends in `.zip`, or the URL of an object store (extra `objects`).
    selection : Selection, optional
        All pages where there is none.
    codec : Codec or str
        `none`, `fast` (lz4 after a shuffle of bits), `small` (Zstandard after a shuffle of bytes), `zstd`.
    processes : int
        1: threads of this one.
    threads : int, optional
        Of this process; up to 4 where not given, 1 where it is to be polite.
    polite : bool, optional
        Stand still three quarters of the time, and run at a lower priority. Where not given: as long as a
        process has the store open for writing when the export begins.
    overwrite : bool
        Replace an archive that is there, or an unfinished export with other options.
    sync : bool
        Have everything on disk before the archive appears. Without it, as after `cp`, a power loss in the
        next seconds may damage it, which its import tells.
    dry_run : bool
        Only say what would be written.
    progress : callable (done, total), optional
        Told bytes of payload.
    encryption : EncryptionKey, path or str, optional
        As of `open_store`, for stores that are encrypted. An archive is not.

    Returns
    -------
    ExportReport

    Raises
    ------
    InvalidArgumentError
        For a wrong argument, or a namespace that is not there; nothing was touched.
    NotAStoreError, FormatVersionError, StoreError
        Where `root` cannot be read.
    EncryptionError
        Where pages that are wanted are encrypted, and their key was not given.
    ArchiveExistsError, ArchiveError
        Where the destination cannot be written, or was not to be overwritten.
    """
    began_s = time.monotonic()
    chosen = selection or Selection()
    codec = Codec.parse(codec)
    place = Place.parse(destination)
    if processes < 1 or (threads is not None and threads < 1):
        raise InvalidArgumentError(f"processes and threads must be above 0, got {processes} and {threads}.")
    found = store_parts(root, EncryptionKey.parse(encryption))
    _refuse_inside(place, root)
    check_namespaces(chosen.namespaces, (part.name.namespace for part in found.parts))
    job = {"root": str(Path(root).absolute()), "codec": codec.value, "version": 1, **chosen.as_dict()}
    check_destination(place, job if dry_run else None, overwrite=overwrite)
    report = ExportReport(place.text, codec.value, problems=found.problems, live=found.live, dry_run=dry_run)
    tokens: dict[bytes, NDArray[np.uint32]] = {}
    listed = _list(found.parts, chosen, tokens)
    for part, pages in listed:
        for reason, count in pages.left_out.items():
            report.lose(reason, count)
        if dry_run and len(pages):
            report.add_part(PartFacts.of(part, len(pages), codec))
    if dry_run or not any(len(pages) for _, pages in listed):
        report.seconds = time.monotonic() - began_s
        return report
    target = open_destination(place, job, overwrite=overwrite, sync=sync)
    try:
        gently = found.live if polite is None else polite
        count = threads or (1 if gently else default_threads())
        with Workers(processes, count, polite=gently) as workers:
            export = _Export(target, codec, workers, report, rest=_REST if gently else 0.0, sync=sync)
            export.run(listed, tokens, progress)
        manifest = manifest_document(export.facts, {part.name.namespace: part.identity for part, _ in listed})
        target.finish(json.dumps(manifest, indent=1, sort_keys=True).encode())
    except BaseException as error:
        target.abandon()
        if isinstance(error, BrokenExecutor):
            raise ArchiveError(f"a process of the export died; {_GOES_ON}.") from error
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            raise ArchiveError(f"{place.text}: {error.strerror or error}; {_GOES_ON}.") from error
        raise
    report.seconds = time.monotonic() - began_s
    return report


def _refuse_inside(place: Place, root: str | os.PathLike[str]) -> None:
    if place.path.name and place.path.is_relative_to(Path(root).resolve()):
        raise ArchiveExistsError(
            f"{place.text} lies inside the store; a root is for stores and nothing else."
        )


def _list(
    parts: list[PartSource], chosen: Selection, tokens: dict[bytes, NDArray[np.uint32]]
) -> list[tuple[PartSource, Candidates]]:
    """List the pages wanted of each part; `tokens` gets the token ids of those that prompts lead to."""
    listed = []
    for part in parts:
        if not chosen.takes(part.name.namespace):
            continue
        check_keys(part, parts)
        keys = chosen.keys
        if chosen.prompts is not None:
            known = keys_of_prompts(chosen.prompts, part.geometry.page_tokens, part.identity, chosen.tenants)
            tokens.update(known)
            keys = frozenset(known) if keys is None else keys & known.keys()
        listed.append((part, list_pages(part, keys, chosen.rank_by)))
    return limit(chosen, listed)


class _Export:
    """An export under way: parts one after another, the shards of each by several workers."""

    def __init__(
        self,
        target: Destination,
        codec: Codec,
        workers: Workers,
        report: ExportReport,
        *,
        rest: float,
        sync: bool,
    ) -> None:
        self.facts: list[PartFacts] = []
        self._target = target
        self._codec = codec
        self._workers = workers
        self._report = report
        self._rest = rest
        self._sync = sync
        self._done = 0
        self._total = 0
        self._progress: Callable[[int, int], None] | None = None
        self._drafts = 0

    def run(
        self,
        listed: list[tuple[PartSource, Candidates]],
        tokens: dict[bytes, NDArray[np.uint32]],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Write every part that has pages."""
        self._progress = progress
        self._total = sum(len(pages) * part.geometry.page_nbytes for part, pages in listed)
        for part, pages in listed:
            if len(pages):
                facts = self._part(part, pages, tokens)
                if facts.pages:
                    self.facts.append(facts)
                    self._report.add_part(facts)

    def _part(
        self, part: PartSource, pages: Candidates, tokens: dict[bytes, NDArray[np.uint32]]
    ) -> PartFacts:
        nbytes = part.geometry.page_nbytes
        axes = len(part.layout.page_shape(part.geometry))
        wanted = min(shard_pages(nbytes), 1 << (len(pages) - 1).bit_length())
        published = PublishedShards(self._target, part.name, axes, wanted)
        capacity = published.capacity
        resumed = published.resume()
        rows = sum(len(one) for one in resumed)
        self._report.resumed_pages += rows
        self._step(rows * nbytes)
        places, names = _not_among(pages, resumed)
        source = PageSource(
            tuple(part.partitions), nbytes, part.geometry.dtype.itemsize, self._codec, self._rest
        )
        rest = self._fill_all(source, published, capacity, places, names)
        for draft in merged(rest):
            published.publish(draft, sync=self._sync)
        writer = PartWriter(self._target, part, self._codec, capacity, bool(tokens))
        return writer.write(published, tokens)

    def _fill_all(
        self,
        source: PageSource,
        published: PublishedShards,
        capacity: int,
        places: NDArray[np.uint64],
        names: NDArray[np.uint64],
    ) -> list[Draft]:
        """Publish full shards until no page is left; return the drafts that are not full.

        A draft that pages turned out to be missing from takes the next ones.
        """
        at, workers = 0, self._workers
        stopped = workers.stopped if workers.in_process else _never
        idle: list[Draft] = []
        while True:
            while at < len(places) and len(workers) < _IN_FLIGHT * workers.count:
                draft = idle.pop() if idle else self._draft(capacity)
                end = at + draft.room
                workers.submit(fill, source, draft, places[at:end], names[at:end], stopped)
                at = end
            if not len(workers):
                break
            for filled in workers.results():
                self._account(filled, source)
                if filled.draft.room:
                    idle.append(filled.draft)
                else:
                    published.publish(filled.draft, sync=self._sync)
        return idle

    def _account(self, filled: Filled, source: PageSource) -> None:
        for reason, count in filled.left_out.items():
            self._report.lose(reason, count)
        self._step((filled.added + sum(filled.left_out.values())) * source.page_nbytes)

    def _draft(self, capacity: int) -> Draft:
        self._drafts += 1
        # A process of an export that was killed may live a moment longer, and writes to no other's drafts.
        name = f"{os.getpid()}-{self._drafts}.shard"
        return Draft(str(self._target.scratch / name), capacity)

    def _step(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


def _never() -> bool:
    return False


def _not_among(
    pages: Candidates, resumed: list[NDArray[np.void]]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return places and names of the pages that are not in the archive yet."""
    if not resumed:
        return pages.places, pages.names
    there = np.concatenate([key_names(rows["key"], rows["key_nbytes"]) for rows in resumed])
    fresh = ~np.isin(pages.names, there)
    return pages.places[fresh], pages.names[fresh]
