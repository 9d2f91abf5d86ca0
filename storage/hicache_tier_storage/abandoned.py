"""Memory of a call that its caller may leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from .lease import Lease

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from numpy.typing import ArrayLike, NDArray

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
    pool
        What the call is given.
    here : bool
        Whether the call is to be made on the caller's thread.
    """

    here = False

    def __init__(self, pool: Pool | None = None) -> None:
        self.pool = cast("Pool", pool)

    def abandon(self) -> None:
        """Take care that the memory is the caller's from now on."""

    def returned(self) -> None:
        """Take note that the abandoned call has returned."""


class OnDevice(Abandonable):
    """Pages of a device pool: their calls follow the stream of the caller's thread."""

    here = True


class Held(Abandonable):
    """Pages of a pool that keeps them back itself: a read needs no copy."""

    def __init__(self, pool: Any, pages: ArrayLike) -> None:  # noqa: ANN401 - both `HostPages` and `Holding`
        super().__init__(pool)
        self._pages = pages

    def abandon(self) -> None:
        """Have the pool keep the pages back."""
        cast("Holding", self.pool).hold(self._pages)

    def returned(self) -> None:
        """Have the pool give the pages out again."""
        cast("Holding", self.pool).let_go(self._pages)


class Leased(Abandonable):
    """Pages under a lease, which ends when the call is left."""

    def __init__(self, pool: HostPages) -> None:
        self._view = LeasedPool(pool)
        super().__init__(self._view)

    def abandon(self) -> None:
        """End the lease."""
        self._view.lease.end()


def abandonable(pool: Pool, pages: ArrayLike, *, write: bool) -> Abandonable:
    """Return what a call may be given so that it can be left.

    Parameters
    ----------
    pool : HostPages or DevicePool
        One with a lease of its own is its caller's business.
    pages : page numbers
    write : bool
        Whether pages go to storage: then nothing lands in memory, and a lease costs no copy.
    """
    if not hasattr(pool, "segment_table"):
        return OnDevice(pool)
    if getattr(pool, "lease", None) is not None:
        return Abandonable(pool)
    if not write and isinstance(pool, Holding):
        return Held(pool, pages)
    return Leased(cast("HostPages", pool))
