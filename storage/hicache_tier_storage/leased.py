"""Host pages that are the store's only for as long as a lease lasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .engine import moved
from .landing import ABANDONED, LeasedBatch, read_leased
from .payload import HostPayload

if TYPE_CHECKING:
    from collections.abc import Callable

    from .engine import ByteEngine
    from .lease import Lease
    from .payload import Places, Sums


@dataclass(frozen=True, slots=True)
class Leased(HostPayload):
    """Pages of a host pool, under a lease.

    Attributes
    ----------
    lease : Lease
    """

    lease: Lease

    def take(self, rows: Any) -> Leased:  # noqa: ANN401 - what indexes an array
        """Return the chosen rows."""
        return Leased(self.host, self.addresses[rows], self.nbytes, self.lease)

    def move(
        self,
        engine: ByteEngine,
        places: Places,
        sums: Sums | None,
        *,
        write: bool,
        meanwhile: Callable[[], object],
    ) -> list[str]:
        """Let the engine move the pages, as long as the lease lasts."""
        del meanwhile
        batch = self.batch(LeasedBatch, places, sums)
        batch.lease = self.lease
        if not write:
            return read_leased(engine, batch)
        if self.lease.ended:
            return [ABANDONED] * len(batch)
        reasons = moved(engine, batch, write=True)
        if self.lease.ended:  # the pages may have changed under the write: what was written is not committed
            return [why or ABANDONED for why in reasons]
        return reasons
