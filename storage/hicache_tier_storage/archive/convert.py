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
    for (_, old), (_, new) in zip(source.components(pages), target.components(out), strict=True):
        part = old[:, :, :, heads.source : heads.source + heads.count]
        into = new[:, :, :, heads.target : heads.target + heads.count]
        for a, b in _by_tokens(part, into):
            if source.geometry.dtype is target.geometry.dtype:
                b[...] = a
            else:
                values, good = _cast(a, source.geometry.dtype, target.geometry.dtype)
                b[...] = values
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


def _cast(values: NDArray[Any], old: DType, new: DType) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Round to the nearest value of another dtype; tell for each page whether all of it stays finite."""
    import torch

    dtypes = {np.dtype(np.uint16): torch.uint16}
    storage = torch.from_numpy(np.ascontiguousarray(values))
    cast = storage.view(old.torch).to(new.torch)
    lost = torch.isinf(cast) & ~torch.isinf(storage.view(old.torch))
    good = ~lost.reshape(len(values), -1).any(dim=1).numpy()
    raw = cast.view(dtypes.get(np.dtype(new.storage), new.torch)).numpy()
    return raw, good
