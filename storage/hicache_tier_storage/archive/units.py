"""What is imported into a target: for each page or group of pages, its keys and the rows it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier_storage.record import key_head, keys_of

from .candidates import key_names
from .rechunk import rekey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .reader import ArchivePart
    from .targets import Target

_STEP = 4096


@dataclass(slots=True)
class Units:
    """Groups of rows that make pages together: one row one page, unless the size of pages changes.

    Attributes
    ----------
    rows : int64 [u, q]
        Rows of the target's first piece; q consecutive pages make one.
    keys : list of bytes, u * r
        Of the pages made; r where one page makes several.
    parents : list of bytes or None, u * r
        Keys before them; the first 8 bytes where no more is known.
    scores : uint64 [u]
        When the pages were last used, Unix s.
    refused : list of (bytes, str)
        Keys of pages of the archive that make none, and why.
    """

    rows: NDArray[np.int64]
    keys: list[bytes]
    parents: list[bytes | None]
    scores: NDArray[np.uint64]
    refused: list[tuple[bytes, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def pages_each(self) -> int:
        """Pages that a unit makes."""
        return len(self.keys) // len(self.rows) if len(self.rows) else 1

    def take(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Units:
        """Return the chosen units, by truth values or numbers, without the refusals."""
        each = self.pages_each
        numbers = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        pages = (numbers[:, None] * each + np.arange(each)).reshape(-1).tolist()
        keys, parents = [self.keys[i] for i in pages], [self.parents[i] for i in pages]
        return Units(self.rows[chosen], keys, parents, self.scores[chosen])

    def batches(self, most: int) -> Iterator[Units]:
        """Cut into batches of at most so many units."""
        each = self.pages_each
        for first in range(0, len(self), most):
            last = min(len(self), first + most)
            pages = slice(first * each, last * each)
            yield Units(self.rows[first:last], self.keys[pages], self.parents[pages], self.scores[first:last])


def parent_key(head: int) -> bytes | None:
    """Return what a store takes for the key of a parent of which only the first 8 bytes are known."""
    return int(head).to_bytes(8, "little") if head else None


def units_of(target: Target, tenants: Sequence[str]) -> Iterator[Units]:
    """Yield a target's units, a bounded number at a time where keys stay as they are."""
    part = target.pieces[0].part
    if target.rekeyed:
        if target.units is None:
            target.units = _rekeyed(target, tenants)
        yield target.units
        return
    for first, rows in part.chunks():
        parents = [parent_key(head) for head in rows["parent"].tolist()]
        numbers = np.arange(first, first + len(rows))[:, None]
        yield Units(numbers, keys_of(rows), parents, rows["access_s"].astype(np.uint64))


def _rekeyed(target: Target, tenants: Sequence[str]) -> Units:
    part, tokens = target.pieces[0].part, target.shape.geometry.page_tokens
    found = rekey(part, tokens, target.identity.as_attributes(), tenants)
    group = max(1, tokens // part.facts.geometry.page_tokens)
    rows = np.array(found.rows, np.int64).reshape(-1, group)
    scores = (
        part.rows(rows.reshape(-1))["access_s"].astype(np.uint64).reshape(-1, group).max(axis=1, initial=0)
    )
    return Units(rows, found.keys, found.parents, scores, found.refused)


class RowFinder:
    """Finds pages of another part by key; 16 bytes a page.

    Parameters
    ----------
    part : ArchivePart
    """

    def __init__(self, part: ArchivePart) -> None:
        names = [key_names(rows["key"], rows["key_nbytes"]) for _, rows in part.chunks()]
        every = np.concatenate([np.zeros(0, np.uint64), *names])
        self._order = np.argsort(every, kind="stable")
        self._names = every[self._order]

    def find(self, rows: NDArray[np.void]) -> NDArray[np.int64]:
        """Return the row of each key, -1 where there is none."""
        names = key_names(rows["key"], rows["key_nbytes"])
        if not len(self._names):
            return np.full(len(names), -1, np.int64)
        at = np.minimum(np.searchsorted(self._names, names), len(self._names) - 1)
        return np.where(self._names[at] == names, self._order[at], -1).astype(np.int64)


def heads_of_units(units: Units) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """First 8 bytes of the key of each unit's first page, and of that of the unit before it."""
    each = units.pages_each
    heads = [key_head(key) for key in units.keys[::each]]
    parents = [0 if key is None else key_head(key) for key in units.parents[::each]]
    if each > 1:  # the page before a unit is the last of another
        first = dict(zip(map(key_head, units.keys[each - 1 :: each]), heads, strict=True))
        parents = [first.get(parent, parent) for parent in parents]
    return np.array(heads, np.uint64), np.array(parents, np.uint64)
