"""A device pool that is the store's only for as long as a lease lasts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lease import Lease

if TYPE_CHECKING:
    from hicache_tier.device_pool import DevicePool


class LeasedDevice:
    """A device pool for one call, whose caller may leave before the call returns.

    Given to `put` and `get` in the pool's place. Once the lease has ended no page of the pool is written any
    more, and nothing that is read from it is committed: such pages have the verdict `abandoned`. A `get` goes
    by way of the store's own memory, and holds the lease while the device copies from there.

    Parameters
    ----------
    pool : DevicePool

    Attributes
    ----------
    pool : DevicePool
    lease : Lease
    """

    __slots__ = ("lease", "pool")

    def __init__(self, pool: DevicePool) -> None:
        self.pool = pool
        self.lease = Lease()
