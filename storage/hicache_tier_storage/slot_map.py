"""How a pool's pages lie in slots: the stored order of axes, as row maps that copy plans take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier_kernels import RowMap, byte_plane

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout


def slot_map(memory: torch.Tensor, geometry: KVGeometry, layout: Layout, pitch: int) -> RowMap:
    """Return the rows of pages that lie in memory as they are stored, `pitch` bytes from one to the next."""
    pages = memory.nbytes // pitch
    planes, start = [], 0
    for component in geometry.components:
        steps = layout.strides(geometry, component, 1)
        row_nbytes = geometry.row_nbytes(component)
        pieces = component.heads if layout.splits_rows else 1
        shape = (pages, geometry.rows, pieces, row_nbytes // pieces)
        strides = (pitch, steps.token, steps.head if pieces > 1 else row_nbytes)
        planes += [
            byte_plane(memory, start + layer * steps.layer, shape, strides)
            for layer in range(geometry.num_layers)
        ]
        start += geometry.component_nbytes(component)
    return RowMap(tuple(planes))


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Pages of a pool as runs of memory that are contiguous in the stored page too.

    Attributes
    ----------
    first, step : int64 [F]
        Address of each fragment of page 0, in stored order, and bytes to the next page's.
    nbytes : int
        Of every fragment.
    """

    first: NDArray[np.int64]
    step: NDArray[np.int64]
    nbytes: int

    def addresses(self, pages: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the address of each fragment of each page, `[n, F]`."""
        return (pages[:, None] * self.step + self.first).view(np.uint64)


def whole_fragments(pool: RowMap, slots: RowMap, least_nbytes: int, alignment: int) -> Fragments | None:
    """Return the fragments of a pool's pages, one a plane.

    Parameters
    ----------
    pool, slots : RowMap
        The pool, and how its pages are stored.
    least_nbytes, alignment : int
        Bytes that a fragment must have, and what addresses and lengths must be multiples of.

    Returns
    -------
    Fragments or None
        None where some plane's page is in several pieces on either side, or too short, or not aligned, or
        where planes differ in length.
    """
    order = sorted(range(len(slots.planes)), key=lambda plane: slots.planes[plane].data_ptr())
    planes = [pool.planes[plane] for plane in order]
    nbytes = planes[0][0].numel()
    first = np.array([plane.data_ptr() for plane in planes], np.int64)
    step = np.array([plane.stride(0) for plane in planes], np.int64)
    whole = all(_in_one_piece(plane) for side in (pool, slots) for plane in side.planes)
    alike = all(plane[0].numel() == nbytes for plane in planes)
    bits = int(np.bitwise_or.reduce(first) | np.bitwise_or.reduce(step) | nbytes)
    if not whole or not alike or nbytes < least_nbytes or bits % alignment:
        return None
    return Fragments(first, step, nbytes)


def _in_one_piece(plane: torch.Tensor) -> bool:
    _, rows, pieces, piece_nbytes = plane.shape
    _, row, piece, _ = plane.stride()
    return (pieces == 1 or piece == piece_nbytes) and (rows == 1 or row == pieces * piece_nbytes)


def regions_of(pool: RowMap) -> tuple[tuple[int, int], ...]:
    """Return address and length of the memory of each plane."""
    return tuple(
        (plane.data_ptr(), (plane.shape[0] - 1) * plane.stride(0) + _extent(plane)) for plane in pool.planes
    )


def _extent(plane: torch.Tensor) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(plane.shape[1:], plane.stride()[1:], strict=True))
