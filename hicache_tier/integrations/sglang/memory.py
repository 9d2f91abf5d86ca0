"""Pages of one call, as the store takes them: in a host pool, in tensors, or markers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_tier_storage.lease import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch
    from numpy.typing import ArrayLike, NDArray

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout

    from .view import PoolView


class CallPages:
    """Pages in memory of the caller's, lent for one call.

    Parameters
    ----------
    geometry : KVGeometry
    layout : Layout
    addresses : callable
        From numbers of pages in the call, int64 [m], to the addresses of their segments, int64 [m, F], in
        stored order.
    nbytes : int64 [F]
    keep : object
        What keeps the memory mapped.

    Attributes
    ----------
    lease : Lease
        Ended by the caller before it returns.
    tensors : list of torch.Tensor
        The pages, where each has a tensor of its own.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        layout: Layout,
        addresses: Callable[[Any], NDArray[np.int64]],
        nbytes: NDArray[np.int64],
        *,
        keep: object = None,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        self.geometry, self.layout, self.tensors = geometry, layout, list(tensors)
        self.lease = Lease()
        self._addresses, self._nbytes, self._keep = addresses, nbytes, keep

    def segment_table(self, pages: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
        """Addresses `[n, F]` of each page's segments in stored order, and their lengths `[F]`."""
        return self._addresses(np.asarray(pages)), self._nbytes

    def in_use(self) -> AbstractContextManager[object]:
        """Do nothing: the memory stays mapped as long as this object lives."""
        return nullcontext()


def pool_pages(view: PoolView, pages: NDArray[np.int64]) -> CallPages:
    """Return pages of a host pool; where they lie is worked out as the store asks for it."""
    return CallPages(
        view.geometry, view.layout, lambda rows: view.addresses(pages[rows]), view.nbytes, keep=view.keep
    )


def tensor_pages(view: PoolView, tensors: Sequence[torch.Tensor]) -> CallPages:
    """Return pages that lie in a contiguous tensor each, of `page_nbytes`."""
    rows = np.array([[tensor.data_ptr()] for tensor in tensors], np.int64).reshape(len(tensors), 1)
    nbytes = np.array([view.geometry.page_nbytes], np.int64)
    return CallPages(view.geometry, view.layout, rows.__getitem__, nbytes, tensors=tensors)


def marker_pages(view: PoolView, count: int) -> CallPages:
    """Return pages that stand for others: they all lie in the same place, and hold nothing."""
    nothing = np.zeros(view.geometry.page_nbytes, np.uint8)
    rows = np.full((count, 1), nothing.ctypes.data, np.int64)
    nbytes = np.array([len(nothing)], np.int64)
    return CallPages(view.geometry, view.layout, rows.__getitem__, nbytes, keep=nothing)
