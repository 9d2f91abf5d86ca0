"""The shape that a copy kernel is compiled for, from the row maps of both sides."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from .memo import PairMemo

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from numpy.typing import NDArray

    from .plan import RowMap

LINE_NBYTES = 128
"""What a multiprocessor asks host memory for at once."""
WORD_NBYTES = 16


@dataclass(frozen=True, slots=True)
class Side:
    """Base address and byte strides of one side of a plane."""

    base: int
    page: int
    row: int
    piece: int

    @classmethod
    def of(cls, view: torch.Tensor, pieces: int) -> Side:
        """Describe a plane with its rows seen as `pieces` pieces."""
        page, row, piece, _ = view.stride()
        if view.shape[2] != pieces:
            piece = view.shape[3] // pieces
        return cls(view.data_ptr(), page, row, piece)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a copy kernel is specialised on; names as in `copy_pages.cu`.

    Attributes
    ----------
    word : int
        Bytes a lane moves at once.
    piece, pieces, rows : int
        Bytes of a piece, pieces of a row, rows of a page.
    run, runs : int
        Bytes contiguous on the near side, and how many such runs a page has.
    lines : int
        Lines of 128 bytes that a run can touch.
    shifted : bool
        Whether a run may start within a line.
    joined : bool
        Whether a run is contiguous on the far side too.
    far_run : int
        Bytes contiguous on the far side.
    """

    word: int
    piece: int
    pieces: int
    rows: int
    run: int
    runs: int
    lines: int
    shifted: bool
    joined: bool
    far_run: int


@dataclass(frozen=True, slots=True)
class PlaneGroup:
    """Planes that one kernel can copy."""

    shape: Shape
    planes: frozenset[int]


def group_planes(near: RowMap, far: RowMap) -> tuple[PlaneGroup, ...]:
    """Group planes by row width; each group's shape holds for all of its planes."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for number, (ours, theirs) in enumerate(zip(near.planes, far.planes, strict=True)):
        pieces = max(ours.shape[2], theirs.shape[2])
        kinds.setdefault((pieces, ours.shape[2] * ours.shape[3] // pieces), []).append(number)
    groups = []
    for (pieces, piece), numbers in kinds.items():
        sides = [[Side.of(side.planes[number], pieces) for number in numbers] for side in (near, far)]
        groups.append(PlaneGroup(_shape(pieces, piece, near.rows, *sides), frozenset(numbers)))
    return tuple(groups)


def plane_table(source: RowMap, destination: RowMap) -> NDArray[np.int64]:
    """Return what `struct Plane` of the kernel holds: `[planes, 8]`, source then destination."""
    table = np.empty((len(source.planes), 8), dtype=np.int64)
    for number, views in enumerate(zip(source.planes, destination.planes, strict=True)):
        pieces = max(view.shape[2] for view in views)
        sides = [Side.of(view, pieces) for view in views]
        table[number] = [value for side in sides for value in (side.base, side.page, side.row, side.piece)]
    return table


plane_groups = PairMemo(group_planes)
"""`group_planes`, remembered."""


def _shape(pieces: int, piece: int, rows: int, near: list[Side], far: list[Side]) -> Shape:
    levels = [_level(sides, pieces, piece, rows) for sides in (near, far)]
    if min(levels) > 0:
        pieces, piece = 1, pieces * piece
    row = pieces * piece
    sizes = (piece, row, rows * row)
    run, far_run = sizes[levels[0]], sizes[levels[1]]
    runs = rows * row // run
    # Below a page's run strides of single rows and pieces count too, where there are several.
    near_steps = _steps(near, rows if levels[0] < 2 else 1, pieces if levels[0] < 1 else 1)
    aligned = gcd(LINE_NBYTES, *near_steps)
    steps = (*_steps(near, rows, pieces), *_steps(far, rows, pieces), piece)
    word = gcd(WORD_NBYTES, *steps)
    lines = -(-(run + LINE_NBYTES - aligned) // LINE_NBYTES)
    joined = levels[1] >= levels[0]
    return Shape(word, piece, pieces, rows, run, runs, lines, aligned < LINE_NBYTES, joined, far_run)


def _level(sides: list[Side], pieces: int, piece: int, rows: int) -> int:
    """Return what is contiguous in all planes: 0 a piece, 1 a row, 2 a page."""
    row = pieces * piece
    if pieces > 1 and any(side.piece != piece for side in sides):
        return 0
    return 2 if rows == 1 or all(side.row == row for side in sides) else 1


def _steps(sides: list[Side], rows: int, pieces: int) -> Iterable[int]:
    """Return all that addresses of pieces are sums of."""
    for side in sides:
        yield side.base
        yield side.page
        if rows > 1:
            yield side.row
        if pieces > 1:
            yield side.piece
