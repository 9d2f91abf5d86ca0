"""Plans as lists of plain ranges: what one descriptor of a copy engine can move.

A fragment is what is contiguous on both sides: a piece, a row, or a page of one plane. Pages that follow one
another on both sides are merged into one run, unless a seam between registered ranges lies there.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    seamless : bool
        Whether all pages of each plane lie within one registered range, on both sides.
    """

    groups: tuple[Fragments, ...]
    bases: tuple[NDArray[np.int64], NDArray[np.int64]]
    seamless: bool

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
    groups = tuple(
        _fragments(frozenset(planes), *key)  # type: ignore[arg-type]
        for key, planes in found.items()
    )
    bases = tuple(np.array(side.ptrs, dtype=np.int64) for side in (source, destination))
    seamless = _within_one_range(source) and _within_one_range(destination)
    return PlaneFragments(groups, (bases[0], bases[1]), seamless)


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


def _within_one_range(side: RowMap) -> bool:
    if len(side.registered) < 2:
        return True
    first = np.array(side.ptrs, dtype=np.int64)
    last = first + (side.num_pages - 1) * np.array(side.page_strides, dtype=np.int64)
    starts = np.array([start for start, _ in side.registered], dtype=np.int64)
    return bool(np.all(np.searchsorted(starts, first, "right") == np.searchsorted(starts, last, "right")))


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
        self._seams = [
            np.array([start for start, _ in side.registered], dtype=np.int64)
            for side in (plan.source, plan.destination)
        ]
        self._groups = [(group, self._of_group(group)) for group in self._fragments.groups]

    def count(self, planes: Sequence[int]) -> int:
        """Return about how many ranges some planes have; seams may add a few."""
        if len(self._groups) == 1:
            return len(planes) * len(self._groups[0][1][2])
        return sum(len(ranges[2]) * sum(n in group.planes for n in planes) for group, ranges in self._groups)

    def of(self, planes: Sequence[int]) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
        """Return destinations, sources and lengths of the ranges of some planes."""
        parts = []
        for group, ranges in self._groups:
            mine = planes if len(self._groups) == 1 else [n for n in planes if n in group.planes]
            if group.whole and not self._fragments.seamless:
                parts += [self._at([plane], *self._of_group(group, plane)) for plane in mine]
            elif len(mine):
                parts.append(self._at(mine, *ranges))
        sources, destinations, sizes = (
            column[0] if len(column) == 1 else np.concatenate(column) for column in zip(*parts, strict=True)
        )
        return destinations.view(np.uint64), sources.view(np.uint64), sizes.view(np.uint64)

    def _at(
        self,
        planes: Sequence[int],
        sources: NDArray[np.int64],
        destinations: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        numbers = list(planes)
        bases = self._fragments.bases
        return (
            (bases[0][numbers, None] + sources).ravel(),
            (bases[1][numbers, None] + destinations).ravel(),
            np.tile(sizes, len(numbers)),
        )

    def _of_group(
        self, group: Fragments, plane: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return sources and destinations as offsets from a plane's page 0, and lengths.

        Pages are merged as if there were no seams, or by the seams of one plane.
        """
        pages = self._pages
        if not group.whole:
            sources = (pages[0][:, None] * group.source_page + group.source).ravel()
            destinations = (pages[1][:, None] * group.destination_page + group.destination).ravel()
            return sources, destinations, np.full(len(sources), group.nbytes, dtype=np.int64)
        # Runs show up whatever order the pages come in.
        order = np.argsort(pages[1], kind="stable")
        ours, theirs = pages[0][order], pages[1][order]
        breaks = (np.diff(ours) != 1) | (np.diff(theirs) != 1)
        if plane is not None:
            for numbers, bases, seams in zip((ours, theirs), self._fragments.bases, self._seams, strict=True):
                ranges = np.searchsorted(seams, bases[plane] + numbers * group.nbytes, "right")
                breaks |= np.diff(ranges) != 0
        first = np.concatenate((np.zeros(min(1, len(ours)), dtype=np.int64), np.flatnonzero(breaks) + 1))
        counts = np.diff(np.append(first, len(ours)))
        return ours[first] * group.nbytes, theirs[first] * group.nbytes, counts * group.nbytes
