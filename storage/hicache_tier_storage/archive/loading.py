"""Pages of an archive straight into a host pool, for a server that starts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.keywords import named_options
from hicache_tier_storage.payload import HostPages
from hicache_tier_storage.record import key_head

from .batches import BatchReader
from .conversion import Conversion
from .convert import FLOATS, Shape
from .errors import ArchiveError
from .ranking import Ranking
from .reader import open_archive
from .targets import plan_targets
from .units import RowFinder, Units, heads_of_units, units_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from hicache_tier_storage.identity import Identity

    from .reader import Archive
    from .targets import Target

_BATCH_NBYTES = 4 << 20


class HostPool(HostPages, Protocol):
    """What loading needs of a host pool."""

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated."""

    def alloc(self, n: int, owner: str | None = None) -> Any:  # noqa: ANN401 - a tensor of page numbers
        """Take pages."""

    def free(self, pages: object, owner: str | None = None) -> None:
        """Give pages back."""


@dataclass(slots=True)
class Loaded:
    """Pages in a host pool.

    Attributes
    ----------
    keys : list of bytes
        Best first: those used last, each after the pages before it in its chain.
    parents : list of bytes or None
        Keys of the pages before them; the first 8 bytes where that page was not loaded.
    pages : list of int
        Where they are.
    refused : list of (bytes, str)
        Keys of pages that were wanted and cannot be had, and why.
    """

    keys: list[bytes] = field(default_factory=list)
    parents: list[bytes | None] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    refused: list[tuple[bytes, str]] = field(default_factory=list)


@named_options
def load_archive(
    source: str | Path | Archive,
    host: HostPool,
    *,
    namespace: str = "",
    tp: tuple[int, int] | None = None,
    kv_heads: int | None = None,
    allow_lossy: bool = False,
    tenants: Sequence[str] = (),
    max_pages: int | None = None,
) -> Loaded:
    """Fill free pages of a host pool with the pages of an archive that were used last, whole prefixes first.

    Each page is checked, and converted to the pool's geometry and layout where that can be done.

    Parameters
    ----------
    source : path, str or Archive
    host : HostPool
    namespace : str
        First digits of the archive's namespace; needed where the pages of several would fit the pool.
    tp : (rank, size), optional
        Of the pool, where the archive's ranks are others or there are several.
    kv_heads, allow_lossy, tenants
        As for `Conversion` and `import_archive`.
    max_pages : int, optional
        Most pages to take; all that are free where not given.

    Returns
    -------
    Loaded
        The pages are the caller's, allocated from the pool.

    Raises
    ------
    NotAnArchiveError, ArchiveError
        Where the archive is not what an export writes, or has nothing for this pool.
    InvalidArgumentError
        Where it is not clear which pages are wanted.
    """
    archive = open_archive(source) if isinstance(source, str | Path) else source
    try:
        conversion = fitting(host, tp[1] if tp else None, kv_heads, allow_lossy=allow_lossy)
        plan = plan_targets(archive, conversion, tenants, (namespace,) if namespace else ())
        targets = [target for target in plan.targets if _fits(target, host)]
        if tp is not None:
            targets = [t for t in targets if "tp" in t.identity.replicated or t.identity.tp.rank == tp[0]]
        if len(targets) > 1:
            raise InvalidArgumentError(
                f"{len(targets)} ranks or namespaces of {archive.place.text} fit the pool: "
                f"{', '.join(map(str, targets))}. Say which with tp and namespace."
            )
        if not targets:
            raise nothing_for(archive, plan.refused)
        free = host.free_pages
        return _fill(PageFeed(targets[0], tenants, free if max_pages is None else min(free, max_pages)), host)
    finally:
        if archive is not source:
            archive.close()


def fitting(host: HostPages, tp: int | None, kv_heads: int | None, *, allow_lossy: bool) -> Conversion:
    """Return the conversion to what a host pool holds."""
    geometry = host.geometry
    dtype = geometry.dtype if geometry.dtype in FLOATS else None
    return Conversion(host.layout, geometry.page_tokens, tp, kv_heads, dtype, allow_lossy)


def target_of(
    archive: Archive, host: HostPages, identity: Identity, *, kv_heads: int | None, allow_lossy: bool
) -> Target:
    """Return the target whose pages are those of a store with this identity.

    Raises
    ------
    ArchiveError
        Where there is none, with the reasons.
    """
    conversion = fitting(host, identity.tp.size, kv_heads, allow_lossy=allow_lossy)
    tenants = () if identity.tenant is None else (identity.tenant,)
    plan = plan_targets(archive, conversion, tenants)
    wanted = (identity.namespace, identity.rank, identity.pool)
    targets = [
        target
        for target in plan.targets
        if (target.identity.namespace, target.identity.rank, target.identity.pool) == wanted
    ]
    if not targets:
        raise nothing_for(archive, plan.refused)
    return max(targets, key=lambda target: target.pieces[0].part.facts.pages)


def nothing_for(archive: Archive, refused: list[Any]) -> ArchiveError:
    """Return the error for an archive without pages for a pool."""
    reasons = "; ".join(dict.fromkeys(reason for _, reason in refused))
    why = reasons or "its models, ranks or geometries are others"
    return ArchiveError(f"{archive.place.text} holds no pages for this pool: {why}.")


def _fits(target: Target, host: HostPages) -> bool:
    shape = target.shape
    return shape.same_bytes(Shape(host.geometry, host.layout))


class PageFeed:
    """The best pages of a target, to be read in any number of batches.

    Parameters
    ----------
    target : Target
    tenants : sequence of str
    most : int
        Pages to take at most.

    Attributes
    ----------
    keys, parents : list
        Best first.
    """

    def __init__(self, target: Target, tenants: Sequence[str], most: int) -> None:
        units = _best(list(units_of(target, tenants)), most)
        self._reader = BatchReader(target, [RowFinder(piece.part) for piece in target.pieces[1:]])
        self._units = units
        self._nbytes = target.shape.geometry.page_nbytes
        self.keys = units.keys
        known = {key_head(key): key for key in units.keys}
        self.parents = [None if key is None else known.get(key_head(key), key) for key in units.parents]

    def read_into(self, host: HostPages, places: Mapping[int, int]) -> dict[int, str]:
        """Fill host pages with some of the pages.

        Parameters
        ----------
        host : HostPool
        places : mapping of int to int
            Numbers of pages, as in `keys`, to pages of the pool.

        Returns
        -------
        dict
            For each of the numbers "" or what is wrong with that page.
        """
        units, each = self._units, self._units.pages_each
        needed = np.unique(np.array([*places], np.int64) // each)
        order = needed[np.argsort(units.rows[needed, 0], kind="stable")]
        step = max(1, _BATCH_NBYTES // (each * self._nbytes))
        reasons: dict[int, str] = {}
        for first in range(0, len(order), step):
            numbers = order[first : first + step]
            pages, why = self._reader.read(units.take(numbers))
            made = (numbers[:, None] * each + np.arange(each)).reshape(-1).tolist()
            wanted = [(at, number) for at, number in enumerate(made) if number in places]
            reasons |= {number: why[at] for at, number in wanted}
            good = [(at, places[number]) for at, number in wanted if not why[at]]
            addresses, lengths = host.segment_table([page for _, page in good])
            for (at, _), row in zip(good, addresses.tolist(), strict=True):
                _scatter(pages[at], row, lengths.tolist())
        return reasons


def _best(parts: list[Units], most: int) -> Units:
    """Join units; keep the best that make at most so many pages, best first."""
    rows = np.concatenate([units.rows for units in parts])
    scores = np.concatenate([units.scores for units in parts])
    keys = [key for units in parts for key in units.keys]
    parents = [key for units in parts for key in units.parents]
    every = Units(rows, keys, parents, scores)
    heads, above = heads_of_units(every)
    ranking = Ranking.of(heads, above, scores, np.full(len(heads), every.pages_each, np.int64))
    inside = np.isin(heads, Ranking.chosen([ranking], most)[0])
    order = ranking.order(heads)
    return every.take(order[inside[order]])


def _scatter(page: NDArray[np.uint8], addresses: Sequence[int], lengths: Sequence[int]) -> None:
    """Copy a page in stored order to where a pool has its pieces."""
    at = page.ctypes.data
    for address, nbytes in zip(addresses, lengths, strict=True):
        ctypes.memmove(address, at, nbytes)
        at += nbytes


def _fill(feed: PageFeed, host: HostPool) -> Loaded:
    """Allocate pages for a feed, fill them, and give back those that could not be had."""
    found = Loaded()
    if not feed.keys:
        return found
    taken = host.alloc(len(feed.keys))
    if taken is None:
        raise InvalidArgumentError(
            f"{len(feed.keys)} pages were free, and another owner took some; try again."
        )
    numbers = taken.tolist()
    try:
        with host.in_use():
            reasons = feed.read_into(host, dict(enumerate(numbers)))
    except BaseException:
        host.free(numbers)
        raise
    for at, page in enumerate(numbers):
        if reasons[at]:
            found.refused.append((feed.keys[at], reasons[at]))
            host.free([page])
        else:
            found.keys.append(feed.keys[at])
            found.parents.append(feed.parents[at])
            found.pages.append(page)
    return found
