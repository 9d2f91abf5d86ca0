"""Plans as lists of plain ranges: what one descriptor of a copy engine can move.

A fragment is what is contiguous on both sides: a piece, a row, or a page of one plane. Pages that follow one
another on both sides are merged into one run, unless a seam between registered ranges lies there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .memo import PairMemo
from .shapes import Side, plane_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .plan import CopyPlan, RowMap
    from .shapes import Shape


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """How the fragments of some planes lie within a page; the same for all of them.

    Attributes
    ----------
    planes : frozenset[int]
    nbytes : int
        Of each fragment.
    source, destination : numpy.ndarray
        int64 `[k]`: offsets of fragments from the start of the page.
    source_page, destination_page : int
        Bytes from a page to the next.
    whole : bool
        Whether the one fragment is the page, and pages follow one another without gaps on both sides.
    """

    planes: frozenset[int]
    nbytes: int
    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    source_page: int
    destination_page: int
    whole: bool


@dataclass(frozen=True, slots=True, eq=False)
class PlaneFragments:
    """The fragments of all planes of two row maps.

    Attributes
    ----------
    groups : tuple[Fragments, ...]
    bases : tuple[numpy.ndarray, numpy.ndarray]
        int64 `[planes]`: addresses of page 0, source and destination.
    seams : tuple[numpy.ndarray, numpy.ndarray]
        int64, ascending: addresses where registered ranges begin, source and destination; none where all
        pages of each plane lie within one.
    """

    groups: tuple[Fragments, ...]
    bases: tuple[NDArray[np.int64], NDArray[np.int64]]
    seams: tuple[NDArray[np.int64], NDArray[np.int64]]
    _bases_of: dict[Sequence[int], tuple[NDArray[np.int64], NDArray[np.int64], int]] = field(
        default_factory=dict
    )

    def bases_of(
        self, planes: Sequence[int], destination_page: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return the bases of planes of one group, int64 `[planes, 1]`, and how many lie in a page together.

        Kept, for the same are asked for often.
        """
        found = self._bases_of.get(planes)
        if found is None:
            numbers = list(planes)
            ours, theirs = (bases[numbers, None] for bases in self.bases)
            together = _together(theirs[:, 0], destination_page)
            found = self._bases_of.setdefault(planes, (ours, theirs, together))
        return found

    @property
    def smallest(self) -> Fragments:
        """The group with the shortest fragments."""
        return min(self.groups, key=lambda group: group.nbytes)


def split_planes(source: RowMap, destination: RowMap) -> PlaneFragments:
    """Return the fragments of all planes, those of equal strides together."""
    found: dict[tuple[object, ...], list[int]] = {}
    for shape_group in plane_groups(source, destination):
        for number in sorted(shape_group.planes):
            views = source.planes[number], destination.planes[number]
            pieces = max(view.shape[2] for view in views)
            strides = tuple(
                (side.page, side.row, side.piece) for side in (Side.of(view, pieces) for view in views)
            )
            found.setdefault((shape_group.shape, pieces, strides), []).append(number)
    bases = tuple(np.array(side.ptrs, dtype=np.int64) for side in (source, destination))
    groups = tuple(
        _fragments(frozenset(planes), *key)  # type: ignore[arg-type]
        for key, planes in found.items()
    )
    return PlaneFragments(groups, (bases[0], bases[1]), (_seams_of(source), _seams_of(destination)))


fragments_of = PairMemo(split_planes)
"""`split_planes`, remembered."""


def fragment_nbytes(source: RowMap, destination: RowMap) -> int:
    """Return the bytes of the shortest fragment of all planes."""
    return fragments_of(source, destination).smallest.nbytes


def _fragments(
    planes: frozenset[int],
    shape: Shape,
    pieces: int,
    strides: tuple[tuple[int, int, int], tuple[int, int, int]],
) -> Fragments:
    row = shape.pieces * shape.piece
    run = min(shape.run, shape.far_run)
    if run == row * shape.rows:
        steps = [(0, 0)]
    elif run == row:
        steps = [(number, 0) for number in range(shape.rows)]
    else:
        steps = [(number, piece) for number in range(shape.rows) for piece in range(pieces)]
    at = np.array(steps, dtype=np.int64)
    ours, theirs = (at[:, 0] * row_stride + at[:, 1] * piece for _, row_stride, piece in strides)
    pages = strides[0][0], strides[1][0]
    whole = len(steps) == 1 and set(pages) == {run}
    return Fragments(planes, run, ours, theirs, pages[0], pages[1], whole)


def _together(bases: NDArray[np.int64], page_nbytes: int) -> int:
    """Return how many planes in a row lie in one page of a side; 1 where that is not the same for all."""
    apart = np.diff(bases)
    first = np.flatnonzero((apart < 0) | (apart >= page_nbytes))
    count = int(first[0]) + 1 if len(first) else len(bases)
    starts, rest = bases[::count], len(bases) % count
    within = bases - np.repeat(starts, count)[: len(bases)]
    return 1 if rest or within.min() < 0 or within.max() >= page_nbytes else count


def _seams_of(side: RowMap) -> NDArray[np.int64]:
    starts = np.array([start for start, _ in side.registered], dtype=np.int64)
    first = np.array(side.ptrs, dtype=np.int64)
    last = first + (side.num_pages - 1) * np.array(side.page_strides, dtype=np.int64)
    alike = np.searchsorted(starts, first, "right") == np.searchsorted(starts, last, "right")
    return starts[:0] if alike.all() else starts


class Ranges:
    """The ranges of a plan, plane by plane.

    Parameters
    ----------
    plan : CopyPlan
        With its page numbers on the CPU.
    """

    def __init__(self, plan: CopyPlan) -> None:
        self._fragments = fragments_of(plan.source, plan.destination)
        self._pages = [
            numbers.astype(np.int64, copy=False) for numbers in plan.numbers if numbers is not None
        ]
        self._groups = [(group, self._of_group(group)) for group in self._fragments.groups]

    def count(self, planes: Sequence[int]) -> int:
        """Return about how many ranges some planes have; seams may add a few."""
        if len(self._groups) == 1:
            return len(planes) * len(self._groups[0][1][0])
        return sum(len(ranges[0]) * sum(n in group.planes for n in planes) for group, ranges in self._groups)

    def of(self, planes: Sequence[int]) -> NDArray[np.uint64]:
        """Return the ranges of some planes, uint64 `[3, n]`: destinations, sources and lengths."""
        planes = planes if isinstance(planes, range) else tuple(planes)
        if len(self._groups) == 1:
            group, ranges = self._groups[0]
            return self._at(planes, group, ranges).view(np.uint64)
        parts = [
            self._at(mine, group, ranges)
            for group, ranges in self._groups
            if (mine := tuple(n for n in planes if n in group.planes))
        ]
        return np.concatenate(parts, axis=1).view(np.uint64)

    def _at(self, planes: Sequence[int], group: Fragments, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        ours, theirs, together = self._fragments.bases_of(planes, group.destination_page)
        by_plane = np.empty((3, len(planes), ranges.shape[1]), dtype=np.int64)
        np.add(theirs, ranges[0], out=by_plane[0])
        np.add(ours, ranges[1], out=by_plane[1])
        by_plane[2] = ranges[2]
        if together > 1:
            shape = 3, len(planes) // together, together, len(self._pages[0]), len(group.source)
            return by_plane.reshape(shape).swapaxes(2, 3).reshape(3, -1)
        found = by_plane.reshape(3, -1)
        if group.whole:
            for side, seams in zip((1, 0), self._fragments.seams, strict=True):
                if len(seams):
                    found = _cut(found, side, seams)
        return found

    def _of_group(self, group: Fragments) -> NDArray[np.int64]:
        """Return ranges as offsets from a plane's page 0; pages are merged as if there were no seams.

        They come in the destination's order: on a busy device the DMA unit writes to host memory in order at
        0.97 of a contiguous copy, and here and there at 0.88 (128 KiB ranges, H200), and runs show up
        whatever order the pages come in.
        """
        order = np.argsort(self._pages[1], kind="stable")
        ours, theirs = (pages[order] for pages in self._pages)
        if not group.whole:
            found = np.empty((3, len(ours) * len(group.source)), dtype=np.int64)
            found[0] = (theirs[:, None] * group.destination_page + group.destination).ravel()
            found[1] = (ours[:, None] * group.source_page + group.source).ravel()
            found[2] = group.nbytes
            return found
        breaks = (np.diff(ours) != 1) | (np.diff(theirs) != 1)
        first = np.concatenate((np.zeros(min(1, len(ours)), dtype=np.int64), np.flatnonzero(breaks) + 1))
        counts = np.diff(np.append(first, len(ours)))
        return np.stack((theirs[first], ours[first], counts)) * group.nbytes


def _cut(ranges: NDArray[np.int64], side: int, seams: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ranges `[3, n]`, those which cross a seam on one side (0 or 1) cut there."""
    first = np.searchsorted(seams, ranges[side], "right")
    last = np.searchsorted(seams, ranges[side] + ranges[2] - 1, "right")
    if np.array_equal(first, last):
        return ranges
    parts = last - first + 1
    mine = np.repeat(ranges, parts, axis=1)
    nth = np.arange(mine.shape[1]) - np.repeat(np.cumsum(parts) - parts, parts)
    at = np.repeat(first, parts) + nth  # the first seam behind each part, if there is one
    ends = np.append(seams, np.iinfo(np.int64).max)
    start = mine[side]
    begin = np.where(nth > 0, seams[at - 1], start)
    shift = begin - start
    return np.stack((mine[0] + shift, mine[1] + shift, np.minimum(start + mine[2], ends[at]) - begin))
