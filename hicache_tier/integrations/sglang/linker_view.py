"""One of SGLang's device pools, as pages that the store's device route moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .view import pages_named

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from hicache_tier.device_pool import DevicePool
    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class DeviceView:
    """A device pool of a server, and what a page of it is; what `PoolView` is of a host pool.

    Attributes
    ----------
    pool
        SGLang's device pool.
    name : str
        Of the pool, as SGLang's host pools and transfers bear it.
    source : str
        Name of the pool whose keys and slots this one follows; its own where it has some.
    device : DevicePool
    layout : Layout
        Order of axes in the store.
    facts : dict
        What SGLang says of the pool, for the identity; the same as for its host pool.
    sharded : bool
        Whether tensor-parallel ranks hold different bytes, as far as the pool itself tells.
    translate : callable, optional
        From slots of `source` to slots of this pool, where they differ.
    """

    pool: Any
    name: str
    source: str
    device: DevicePool
    layout: Layout
    facts: dict[str, Any]
    sharded: bool
    translate: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def marker(self) -> bool:
        """Whether only the fact that a page was there is stored: never."""
        return False

    @property
    def geometry(self) -> KVGeometry:
        """What a page holds."""
        return self.device.geometry

    @property
    def page_tokens(self) -> int:
        """Slots a page."""
        return self.geometry.page_tokens

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.device.num_pages

    def pages(self, slots: torch.Tensor, count: int, *, unique: bool) -> NDArray[np.int64]:
        """Return page numbers for slots of `source`, one page after the other; waits for the device.

        Raises
        ------
        InvalidArgumentError
            Where they are not `count` whole pages of this pool.
        """
        own = slots if self.translate is None else self.translate(slots)
        return pages_named(self, own, count, unique=unique)
