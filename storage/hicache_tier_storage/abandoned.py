"""Memory of a call that its caller may leave."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from .lease import Lease
from .leased_device import LeasedDevice
from .payloads import page_array

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from numpy.typing import ArrayLike, NDArray

    from hicache_tier.device_pool import DevicePool
    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout

    from .payload import HostPages, Pool


@runtime_checkable
class Holding(Protocol):
    """A pool that can keep pages from being given out while something may still write to them."""

    def hold(self, pages: ArrayLike) -> None:
        """Give these pages to nobody else, even after they are freed."""

    def let_go(self, pages: ArrayLike) -> None:
        """Undo one `hold` of each page."""


class LeasedPool:
    """A pool as the store sees it for as long as a lease lasts.

    Parameters
    ----------
    pool : HostPages
    """

    def __init__(self, pool: HostPages) -> None:
        self.lease = Lease()
        self._pool = pool

    @property
    def geometry(self) -> KVGeometry:
        """The pool's."""
        return self._pool.geometry

    @property
    def layout(self) -> Layout:
        """The pool's."""
        return self._pool.layout

    def segment_table(self, pages: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
        """See the pool's."""
        return self._pool.segment_table(pages)

    def in_use(self) -> AbstractContextManager[object]:
        """See the pool's."""
        return self._pool.in_use()


class Abandonable:
    """What a call moves, and what becomes of it when the call is left.

    Attributes
    ----------
    pool, pages
        What the call is given.
    """

    def __init__(self, pool: Pool | None = None, pages: ArrayLike = ()) -> None:
        self.pool = cast("Pool", pool)
        self.pages = pages

    def around(self) -> AbstractContextManager[object]:
        """Return what the call is made in, on the thread that makes it."""
        return nullcontext()

    def abandon(self) -> None:
        """Take care that the memory is the caller's from now on."""

    def returned(self) -> None:
        """Take note that the abandoned call has returned."""


class Held(Abandonable):
    """Pages of a pool that keeps them back itself: a read needs no copy."""

    def abandon(self) -> None:
        """Have the pool keep the pages back."""
        cast("Holding", self.pool).hold(self.pages)

    def returned(self) -> None:
        """Have the pool give the pages out again."""
        cast("Holding", self.pool).let_go(self.pages)


class Leased(Abandonable):
    """Pages under a lease, which ends when the call is left."""

    def __init__(self, pool: HostPages, pages: ArrayLike) -> None:
        view = LeasedPool(pool)
        super().__init__(view, pages)
        self._lease = view.lease

    def abandon(self) -> None:
        """End the lease."""
        self._lease.end()


class OnDevice(Abandonable):
    """Pages of a device pool, under a lease: they are touched after what the caller's stream has been given.

    Parameters
    ----------
    pool : DevicePool or LeasedDevice
        A lease that is the caller's own is the caller's to end.
    pages : page numbers
    """

    def __init__(self, pool: DevicePool | LeasedDevice, pages: ArrayLike) -> None:
        from .staging import aside, given_so_far  # here, because it needs torch

        given = pool if isinstance(pool, LeasedDevice) else LeasedDevice(pool)
        self._device, self._aside = given.pool.device, aside
        self._own = given.lease if given is not pool else None
        begin = given.begin or given_so_far(self._device)
        super().__init__(LeasedDevice(given.pool, given.lease, begin), pages)

    def around(self) -> AbstractContextManager[object]:
        """Have no other work of the device be followed."""
        return self._aside(self._device)

    def abandon(self) -> None:
        """End the lease."""
        if self._own is not None:
            self._own.end()


def abandonable(pool: Pool, pages: ArrayLike, *, write: bool) -> Abandonable:
    """Return what a call may be given so that it can be left.

    Parameters
    ----------
    pool : HostPages, DevicePool or LeasedDevice
        One with a lease of its own is its caller's business.
    pages : page numbers
        Copied: what the caller does with them once it has left changes nothing.
    write : bool
        Whether pages go to storage: then nothing lands in memory, and a lease costs no copy.
    """
    numbers = own_copy(pages)
    if not hasattr(pool, "segment_table"):
        return _on_device(pool, numbers)
    if getattr(pool, "lease", None) is not None:
        return Abandonable(pool, numbers)
    if not write and isinstance(pool, Holding):
        return Held(pool, numbers)
    return Leased(cast("HostPages", pool), numbers)


def _on_device(pool: Any, pages: ArrayLike) -> Abandonable:  # noqa: ANN401 - whatever was given as a pool
    from hicache_tier.device_pool import DevicePool  # here, because it needs torch

    return (OnDevice if isinstance(pool, DevicePool | LeasedDevice) else Abandonable)(pool, pages)


def own_copy(pages: Any) -> NDArray[Any]:  # noqa: ANN401 - whatever was given as page numbers
    """Return page numbers of a call's own, in the host's memory.

    Raises
    ------
    InvalidArgumentError
        Where they are no flat sequence.
    """
    return page_array(pages).copy()
