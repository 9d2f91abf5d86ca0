"""A device pool that is the store's only for as long as a lease lasts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lease import Lease

if TYPE_CHECKING:
    import torch

    from hicache_tier.device_pool import DevicePool


class LeasedDevice:
    """A device pool for one call, whose caller may leave before the call returns.

    Given to `put` and `get` in the pool's place. Once the lease has ended no page of the pool is written any
    more, and nothing that is read from it is committed: such pages have the verdict `abandoned`. A `get` goes
    by way of the store's own memory, and holds the lease while the device copies from there.

    Parameters
    ----------
    pool : DevicePool
    lease : Lease, optional
        One of its own where left out.
    begin : torch.cuda.Event, optional
        What the pages are touched after; where left out, all that the stream which is current when the call
        is made has been given.

    Attributes
    ----------
    pool, lease, begin
    """

    __slots__ = ("begin", "lease", "pool")

    def __init__(
        self, pool: DevicePool, lease: Lease | None = None, begin: torch.cuda.Event | None = None
    ) -> None:
        self.pool = pool
        self.lease = lease or Lease()
        self.begin = begin
