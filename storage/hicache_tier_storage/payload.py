"""The pages of one call, wherever they lie: how they are moved, and their checksums on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from .checksum import page_checksum
from .engine import PageBatch, moved

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from hicache_tier.device_pool import DevicePool
    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout

    from .engine import ByteEngine
    from .leased_device import LeasedDevice
    from .slab import SlabShape, StoreFile


Batch = TypeVar("Batch", bound=PageBatch)


class HostPages(Protocol):
    """What the store needs of a host pool.

    A pool with an attribute `lease` is used only as long as that `Lease` lasts, for callers that may leave
    before a call returns. Pages that could not be loaded or stored in time are `abandoned`.
    """

    @property
    def geometry(self) -> KVGeometry:
        """What a page holds."""

    @property
    def layout(self) -> Layout:
        """How the pool orders its axes."""

    def segment_table(self, pages: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
        """Addresses `[n, F]` of each page's segments in stored order, and their lengths `[F]`."""

    def in_use(self) -> AbstractContextManager[object]:
        """Keep the memory mapped while the block runs."""


Pool: TypeAlias = "HostPages | DevicePool | LeasedDevice"
"""Where a caller's pages lie."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where pages go to, or come from: a file and an offset each."""

    files: list[StoreFile]
    offsets: NDArray[np.int64]
    shape: SlabShape


@dataclass(slots=True)
class Sums:
    """Checksums that are computed as pages move.

    Attributes
    ----------
    seeds : list of int
    wanted : list of bool
        Which pages' checksums are asked for.
    values : uint64 [n]
        Filled in for those of them that were moved.
    known : bool
        Whether all of them are filled in while pages are still under way.
    """

    seeds: list[int]
    wanted: list[bool]
    values: NDArray[np.uint64]
    known: bool = False


class Payload(Protocol):
    """Pages in memory of some kind, one row each.

    Attributes
    ----------
    device : int or None
        Number of the CUDA device that they are on.
    """

    @property
    def device(self) -> int | None:
        """Number of the CUDA device that the pages are on; None in the host's memory."""

    def take(self, rows: Any) -> Payload:  # noqa: ANN401 - what indexes an array
        """Return the chosen rows."""

    def in_use(self) -> AbstractContextManager[object]:
        """Keep the memory where it is while the block runs."""

    def move(
        self,
        engine: ByteEngine,
        places: Places,
        sums: Sums | None,
        *,
        write: bool,
        meanwhile: Callable[[], object],
    ) -> list[str]:
        """Write every page to its place, or read it from there; return "" or a reason for each.

        `meanwhile` is work of the caller's that I/O need not wait for. It is called when as much I/O is under
        way as can be, or not at all where an engine blocks: the caller calls it afterwards in any case, and
        it does its work once.
        """


@dataclass(frozen=True, slots=True)
class HostPayload:
    """Pages of a host pool.

    Attributes
    ----------
    host : HostPages
    addresses : uint64 [n, F]
    nbytes : uint64 [F]
    """

    host: HostPages
    addresses: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]

    @property
    def device(self) -> None:
        """None: they are in the host's memory."""
        return

    def take(self, rows: Any) -> HostPayload:  # noqa: ANN401 - what indexes an array
        """Return the chosen rows."""
        return HostPayload(self.host, self.addresses[rows], self.nbytes)

    def in_use(self) -> AbstractContextManager[object]:
        """Keep the pool's memory mapped while the block runs."""
        return self.host.in_use()

    def move(
        self,
        engine: ByteEngine,
        places: Places,
        sums: Sums | None,
        *,
        write: bool,
        meanwhile: Callable[[], object],
    ) -> list[str]:
        """Let the engine move the pages where they lie; it blocks, so that nothing is done meanwhile."""
        del meanwhile
        return moved(engine, self.batch(PageBatch, places, sums), write=write)

    def batch(self, kind: type[Batch], places: Places, sums: Sums | None) -> Batch:
        """Return what an engine is given to move the pages."""
        shape = places.shape
        batch = kind(
            places.files, places.offsets, self.addresses, self.nbytes, shape.page_nbytes, shape.stride
        )
        if sums is not None:
            batch.hook = summing(self.addresses, self.nbytes, sums)
        return batch


def summing(
    addresses: NDArray[np.uint64], nbytes: NDArray[np.uint64], sums: Sums
) -> Callable[[int, int], None]:
    """Return a hook that computes the checksums of pages in the host's memory."""
    rows, lengths = addresses.tolist(), nbytes.tolist()
    seeds, wanted, values = sums.seeds, sums.wanted, sums.values

    def hook(first: int, last: int) -> None:
        for at in range(first, last):
            if wanted[at]:
                values[at] = page_checksum(rows[at], lengths, seeds[at])

    return hook
