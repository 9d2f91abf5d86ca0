"""Pages of a device pool on their way between the pool and slots, without a host pool.

Pages whose fragments are large and aligned move one by one, straight from where they lie. All others are
gathered into a ring, in the order of the stored page, and leave it as whole slots; while the engine moves
some, the device fills or empties others, so that there is always I/O under way. The ring is in device memory
where the engine moves that, and in host memory where it does not.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .device_moves import FragmentMove, Move, RingMove
from .engine import device_mode_of
from .landing import ABANDONED
from .slot_map import regions_of, slot_map, whole_fragments
from .staging import RingKind, StagingError, given_so_far, lent_ring, on_device

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from hicache_tier.device_pool import DevicePool
    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout
    from hicache_tier_kernels import RowMap

    from .engine import ByteEngine
    from .lease import Lease
    from .payload import Places, Sums
    from .slot_map import Fragments

_LOG = logging.getLogger(__name__)
FRAGMENT_NBYTES = 1 << 20
"""Least bytes of a fragment that moves by itself: shorter ones are cheaper gathered."""
FRAGMENT_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class DevicePages:
    """A device pool as a store sees it.

    Attributes
    ----------
    rows : RowMap
    geometry : KVGeometry
        Of the layers that the pool holds.
    layout : Layout
        Order of axes in the store.
    fragments : Fragments or None
        Its pages' fragments, where they move one by one.
    regions : tuple of (address, nbytes)
        Where the pool lies.
    """

    rows: RowMap
    geometry: KVGeometry
    layout: Layout
    fragments: Fragments | None
    regions: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, pool: DevicePool, layout: Layout) -> DevicePages:
        """Look at a pool."""
        geometry = pool.local_geometry
        example = torch.empty(geometry.page_nbytes, dtype=torch.uint8)
        stored = slot_map(example, geometry, layout, geometry.page_nbytes)
        rows = pool.row_map()
        fragments = whole_fragments(rows, stored, FRAGMENT_NBYTES, FRAGMENT_ALIGNMENT)
        return cls(rows, geometry, layout, fragments, regions_of(rows))


@dataclass(frozen=True, slots=True)
class DevicePayload:
    """Pages of a device pool.

    Attributes
    ----------
    pages : DevicePages
    numbers : int64 [n]
    begin : torch.cuda.Event or None
        What the caller's stream had been given when it made the call: the pages are written by then, and
        what is to be overwritten has been read.
    lease : Lease or None
        What is needed to touch the pages, where the caller may leave.
    """

    pages: DevicePages
    numbers: NDArray[np.int64]
    begin: torch.cuda.Event | None
    lease: Lease | None = None

    @classmethod
    def of(
        cls,
        pages: DevicePages,
        numbers: NDArray[np.int64],
        lease: Lease | None = None,
        begin: torch.cuda.Event | None = None,
    ) -> DevicePayload:
        """Name pages; the move comes after `begin`, or all that the current stream has been given."""
        return cls(pages, numbers, begin or given_so_far(pages.rows.device), lease)

    @property
    def device(self) -> int | None:
        """Number of the CUDA device; None where the pool is in the host's memory."""
        where = self.pages.rows.device
        return (where.index or 0) if where.type == "cuda" else None

    def take(self, rows: Any) -> DevicePayload:  # noqa: ANN401 - what indexes an array
        """Return the chosen rows."""
        return replace(self, numbers=self.numbers[rows])

    def in_use(self) -> AbstractContextManager[object]:
        """Do nothing: the pool's tensors are held by its row map."""
        return nullcontext()

    def move(
        self,
        engine: ByteEngine,
        places: Places,
        sums: Sums | None,
        *,
        write: bool,
        meanwhile: Callable[[], object],
    ) -> list[str]:
        """Move the pages; whatever the device or the engine raises becomes every page's reason."""
        reasons = self._move(engine, places, sums, write=write, meanwhile=meanwhile)
        if write and self.lease is not None and self.lease.ended:
            # The pages may have changed under the write: what was written is not committed.
            return [why or ABANDONED for why in reasons]
        return reasons

    def _move(
        self,
        engine: ByteEngine,
        places: Places,
        sums: Sums | None,
        *,
        write: bool,
        meanwhile: Callable[[], object],
    ) -> list[str]:
        where, device = self.pages.rows.device, self.device
        user = engine.name if device is not None and device_mode_of(engine) else ""
        make: type[Move] = RingMove
        kind = RingKind.fitting(where, places.shape.stride, user, write=write)
        lent = self.lease is not None and not write  # nothing may arrive in the pool by itself
        if self.pages.fragments is not None and (user or device is None) and not lent:
            make, kind = FragmentMove, RingKind(where, user, write, 0)
        move: Move | None = None
        try:
            with on_device(where), lent_ring(kind, self.lease) as ring:
                if ring.stream is not None and self.begin is not None:
                    ring.stream.wait_event(self.begin)
                ring.bind()
                move = make(
                    engine, self.pages, self.numbers, ring, places, sums, write=write, lease=self.lease
                )
                return move.run(meanwhile)
        except StagingError as error:
            _LOG.warning("device pages were not moved: %s", error)
            why = str(error)
        except Exception as error:  # noqa: BLE001 - of the driver, of torch: a fault at run time is a verdict
            _LOG.error("device pages were not moved", exc_info=error)
            why = f"device_error: {type(error).__name__}: {error}"
        if move is not None and move.left:
            why = f"timeout: {why}"
        return [why] * len(self.numbers)
