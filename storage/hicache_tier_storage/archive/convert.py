"""Pages in another layout, page size, dtype or number of heads.

There is one way: both sides are viewed by meaning (`Layout.logical_pages`), and elements are assigned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_tier.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from numpy.typing import NDArray

    from hicache_tier.geometry import Component, KVGeometry
    from hicache_tier.layout import Layout

FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class Shape:
    """How pages lie: what one holds, and in which order of axes."""

    geometry: KVGeometry
    layout: Layout

    def components(self, pages: NDArray[np.uint8]) -> Iterator[tuple[Component, NDArray[Any]]]:
        """View pages `uint8 [n, page_nbytes]` as `[n, layer, token, head, dim]`, for each component."""
        at = 0
        for component in self.geometry.components:
            nbytes = self.geometry.component_nbytes(component)
            part = pages[:, at : at + nbytes].view(self.geometry.dtype.storage)
            yield component, self.layout.logical_pages(self.geometry, component, part)
            at += nbytes

    def same_bytes(self, other: Shape) -> bool:
        """Whether a page of the one is a page of the other."""
        return self.geometry == other.geometry and self.layout.page_axes == other.layout.page_axes


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads `source..source+count-1` of one page become `target..target+count-1` of another."""

    source: int
    target: int
    count: int


def convert_pages(
    source: Shape, pages: NDArray[np.uint8], target: Shape, out: NDArray[np.uint8], heads: HeadRange
) -> NDArray[np.bool_]:
    """Assign the elements of pages to others.

    Parameters
    ----------
    source, target : Shape
        Of the same layers and widths. Of their page sizes one is a multiple of the other.
    pages : uint8 [n, source page_nbytes]
        Consecutive pages of a chain lie next to each other where several make one.
    out : uint8 [m, target page_nbytes]
        As many tokens as `pages`.
    heads : HeadRange

    Returns
    -------
    bool [m]
        Whether all values of a page fit the target's dtype; false where a finite one becomes infinite.
    """
    fits = np.ones(len(out), np.bool_)
    old_dtype, new_dtype = source.geometry.dtype, target.geometry.dtype
    for (_, old), (_, new) in zip(source.components(pages), target.components(out), strict=True):
        part = old[:, :, :, heads.source : heads.source + heads.count]
        into = new[:, :, :, heads.target : heads.target + heads.count]
        for a, b in _by_tokens(part, into):
            if old_dtype is new_dtype:
                b[...] = a
            else:
                good = _cast(a, old_dtype, b, new_dtype)
                fits &= good if len(good) == len(fits) else np.repeat(good, len(fits) // len(good))
    return fits


def _by_tokens(old: NDArray[Any], new: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Pair views of equal shape where one side has fewer tokens a page."""
    few, many = sorted((old.shape[2], new.shape[2]))
    parts = many // few
    for at in range(parts):
        tokens = slice(at * few, (at + 1) * few)
        if old.shape[2] == many:
            yield old[:, :, tokens], new[at::parts]
        else:
            yield old[at::parts], new[:, :, tokens]


def _cast(old: NDArray[Any], old_dtype: DType, new: NDArray[Any], new_dtype: DType) -> NDArray[np.bool_]:
    """Round to the nearest value of another dtype; tell for each page whether all of it stays finite.

    It goes a layer of a page at a time, so that torch begins no threads of its own: several pages are
    converted at once already.
    """
    good = np.ones(len(old), np.bool_)
    for page, layer in np.ndindex(old.shape[:2]):
        a = _tensor(old[page, layer]).view(old_dtype.torch)
        b = _tensor(new[page, layer]).view(new_dtype.torch)
        b.copy_(a)
        good[page] &= not bool((b.isinf() & ~a.isinf()).any())
    return good


def _tensor(values: NDArray[Any]) -> torch.Tensor:
    """Share memory with torch."""
    import torch

    return torch.from_numpy(values.view(np.int16) if values.dtype == np.uint16 else values)
