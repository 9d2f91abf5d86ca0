"""From what a caller names to pages that can be moved: checks of pools and page numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.errors import InvalidArgumentError

from .leased import Leased
from .payload import HostPayload

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout

    from .payload import HostPages, Payload


def payload_of(
    pool: HostPages,
    pages: ArrayLike,
    count: int,
    geometry: KVGeometry,
    layout: Layout,
    *,
    unique: bool = False,
) -> Payload:
    """Check that a pool fits a store and return some of its pages.

    Parameters
    ----------
    pool : HostPool
    pages : int tensor or sequence, [count]
    count : int
    geometry, layout
        The store's.
    unique : bool
        Whether no page may be named twice.

    Raises
    ------
    InvalidArgumentError
    """
    if not (hasattr(pool, "segment_table") and hasattr(pool, "geometry")):
        raise InvalidArgumentError(f"a host pool is needed, got {type(pool).__name__}.")
    if pool.geometry != geometry:
        raise InvalidArgumentError(
            f"the host pool holds {pool.geometry.as_dict()}, the store {geometry.as_dict()}."
        )
    if pool.layout.page_axes != layout.page_axes:
        raise InvalidArgumentError(
            f"the order of axes differs: the host pool is {pool.layout.value}, the store {layout.value}."
        )
    page_numbers(pages, count, unique=unique)
    if count == 0:
        return HostPayload(pool, np.empty((0, 1), np.uint64), np.empty(1, np.uint64))
    addresses, nbytes = pool.segment_table(pages)
    addresses, nbytes = addresses.astype(np.uint64, copy=False), nbytes.astype(np.uint64, copy=False)
    lease = getattr(pool, "lease", None)
    return HostPayload(pool, addresses, nbytes) if lease is None else Leased(pool, addresses, nbytes, lease)


def page_numbers(pages: ArrayLike, count: int, *, unique: bool) -> NDArray[np.integer]:
    """Return page numbers as an array; raises `InvalidArgumentError` unless they are `count` integers."""
    try:
        numbers = np.asarray(pages)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"page numbers must be one flat sequence: {error}.") from error
    if numbers.ndim != 1 or len(numbers) != count:
        raise InvalidArgumentError(f"{count} keys need as many pages, got shape {numbers.shape}.")
    if count and numbers.dtype.kind not in "iu":
        raise InvalidArgumentError(f"page numbers must be integers, got {numbers.dtype}.")
    if unique and len(np.unique(numbers)) != count:
        raise InvalidArgumentError("a page is named twice: two keys cannot be loaded into one page.")
    return numbers
