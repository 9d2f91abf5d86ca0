"""Pages of a device pool in one call, and the store that they go to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

from hicache_tier_storage.leased_device import LeasedDevice
from hicache_tier_storage.staging import aside

from .pool import Pages, Pool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hicache_tier_storage import PageStatus

    from .linker_view import DeviceView
    from .view import PoolView


def _nowhere() -> NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(slots=True)
class DevicePages(Pages):
    """Pages of one device pool in one call, and their verdicts as they come in.

    Attributes
    ----------
    memory : LeasedDevice
    numbers : int64 [n]
        Of the pool's pages.
    """

    memory: LeasedDevice  # type: ignore[assignment]  # which has a lease, as the pages of host pools have
    numbers: NDArray[np.int64] = field(default_factory=_nowhere)

    def part(self, start: int, count: int) -> DevicePages:
        """Return some of the pages, as a call of its own."""
        chosen = slice(start, start + count)
        memory = LeasedDevice(self.memory.pool)
        parents = self._parents(chosen)
        return DevicePages(self.pool, self.names[chosen], memory, parents, numbers=self.numbers[chosen])

    def _get(self, part: slice) -> list[PageStatus]:
        with aside(self.memory.pool.device):
            return self.pool.store.get(self.names[part], self.memory, self.numbers[part])

    def _put(self, part: slice) -> list[PageStatus]:
        with aside(self.memory.pool.device):
            return self.pool.store.put(
                self.names[part], self.memory, self.numbers[part], parents=self._parents(part)
            )


class DeviceStore(Pool):
    """A device pool and its store; see `Pool`."""

    @property
    def device_view(self) -> DeviceView:
        """The pool's view."""
        return cast("DeviceView", self.view)

    def at(self, names: list[bytes], numbers: NDArray[np.int64]) -> DevicePages:
        """Return pages where they lie on the device."""
        return DevicePages(self, names, LeasedDevice(self.device_view.device), numbers=numbers)


def as_view(view: DeviceView) -> PoolView:
    """Return a device pool's view as `Pool` takes it: it looks only at what both kinds of view have."""
    return cast("PoolView", view)
