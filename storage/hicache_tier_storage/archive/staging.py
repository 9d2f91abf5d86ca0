"""Pages in plain memory, in stored order, that a store puts and gets like those of a host pool."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout


class StagedPages:
    """What a store needs of a host pool, over one array.

    Parameters
    ----------
    geometry : KVGeometry
    layout : Layout
    pages : uint8 [n, page_nbytes]
        Each page as it is stored. The array is kept alive.
    """

    def __init__(self, geometry: KVGeometry, layout: Layout, pages: NDArray[np.uint8]) -> None:
        self.geometry = geometry
        self.layout = layout
        self.pages = pages
        self._nbytes = np.array([geometry.page_nbytes], np.int64)

    def segment_table(self, pages: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Address of each page `[n, 1]`, and its length `[1]`."""
        numbers = np.asarray(pages, np.int64)
        return (self.pages.ctypes.data + numbers * self.geometry.page_nbytes)[:, None], self._nbytes

    @contextmanager
    def in_use(self) -> Iterator[Self]:
        """Do nothing: the array lives as long as this."""
        yield self
