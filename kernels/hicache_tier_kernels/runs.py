"""Plans as lists of plain ranges: what one descriptor of a copy engine can move.

A fragment is what is contiguous on both sides: a piece, a row, or a page of one plane. Pages that follow one
another on both sides are merged into one run, unless a seam between registered ranges lies there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .plan import PairMemo
from .shapes import Side, plane_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from .plan import CopyPlan, RowMap
    from .shapes import Shape


@dataclass(frozen=True, slots=True)
class Fragments:
    """How the fragments of one plane lie within a page.

    Attributes
    ----------
    nbytes : int
    source, destination : numpy.ndarray
        int64 `[k]`: their offsets from the start of the page, on each side.
    source_side, destination_side : Side
    whole : bool
        Whether the one fragment is the page, and pages follow one another without gaps on both sides.
    """

    nbytes: int
    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    source_side: Side
    destination_side: Side
    whole: bool


def fragment_nbytes(source: RowMap, destination: RowMap) -> int:
    """Return the bytes of the smallest fragment of all planes."""
    return min(plane.nbytes for plane in fragments_of(source, destination))


def split_planes(source: RowMap, destination: RowMap) -> tuple[Fragments, ...]:
    """Return the fragments of each plane's pages."""
    shapes: dict[int, Shape] = {}
    for group in plane_groups(source, destination):
        shapes |= dict.fromkeys(group.planes, group.shape)
    return tuple(
        _split(shapes[number], *views)
        for number, views in enumerate(zip(source.planes, destination.planes, strict=True))
    )


fragments_of = PairMemo(split_planes)
"""`split_planes`, remembered."""


def _split(shape: Shape, source: torch.Tensor, destination: torch.Tensor) -> Fragments:
    pieces = max(source.shape[2], destination.shape[2])
    ours, theirs = Side.of(source, pieces), Side.of(destination, pieces)
    run = min(shape.run, shape.far_run)
    piece = shape.pieces * shape.piece // pieces
    if run == piece and pieces > 1:
        steps = [(row, number) for row in range(shape.rows) for number in range(pieces)]
    else:
        steps = [(row, 0) for row in range(shape.rows)] if run < shape.rows * pieces * piece else [(0, 0)]
    at = np.array(steps, dtype=np.int64)
    offsets = [at[:, 0] * side.row + at[:, 1] * side.piece for side in (ours, theirs)]
    whole = len(steps) == 1 and ours.page == theirs.page == run
    return Fragments(run, offsets[0], offsets[1], ours, theirs, whole)


class Ranges:
    """The ranges of a plan, plane by plane.

    Parameters
    ----------
    plan : CopyPlan
        With its page numbers on the CPU.
    """

    def __init__(self, plan: CopyPlan) -> None:
        self._fragments = fragments_of(plan.source, plan.destination)
        source = plan.source_pages.numpy().astype(np.int64, copy=False)
        destination = plan.destination_pages.numpy().astype(np.int64, copy=False)
        # Runs show up whatever order the pages come in.
        order = np.lexsort((source, destination))
        self._source, self._destination = source[order], destination[order]
        follows = (np.diff(self._source) == 1) & (np.diff(self._destination) == 1)
        self._breaks = ~follows
        self._seams = [
            np.array([start for start, _ in side.registered], dtype=np.int64)
            for side in (plan.source, plan.destination)
        ]

    def of(self, planes: Sequence[int]) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
        """Return destinations, sources and lengths of the ranges of some planes."""
        parts = [self._plane(self._fragments[plane]) for plane in planes]
        joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return joined[0].astype(np.uint64), joined[1].astype(np.uint64), joined[2].astype(np.uint64)

    def _plane(self, plane: Fragments) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        sources = plane.source_side.base + self._source * plane.source_side.page
        destinations = plane.destination_side.base + self._destination * plane.destination_side.page
        if not plane.whole or len(sources) < 2:
            starts = [
                (side[:, None] + at).ravel()
                for side, at in ((sources, plane.source), (destinations, plane.destination))
            ]
            return starts[1], starts[0], np.full(len(starts[0]), plane.nbytes, dtype=np.int64)
        breaks = self._breaks
        for addresses, seams in zip((sources, destinations), self._seams, strict=True):
            if len(seams) > 1:
                breaks = breaks | (np.diff(np.searchsorted(seams, addresses, side="right")) != 0)
        first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        counts = np.diff(np.append(first, len(sources)))
        return destinations[first], sources[first], counts * plane.nbytes
