"""Two pools seen together: which planes of theirs belong to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_tier_kernels.memo import PairMemo

from .errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_tier_kernels import RowMap

    from .device_pool import DevicePool
    from .host_pool import HostPool
    from .lanes import Step
    from .paths import Path


@dataclass(frozen=True, slots=True)
class Pair:
    """The row maps of some layers of two pools, and what was found out about copies between them.

    Attributes
    ----------
    source, destination : RowMap
    layers : tuple[int, ...]
        Global numbers.
    paths : dict
        Paths that were chosen, by the kind of pages.
    """

    source: RowMap
    destination: RowMap
    layers: tuple[int, ...]
    paths: dict[object, Path] = field(default_factory=dict)
    _steps: dict[int, list[Step]] = field(default_factory=dict)

    def steps(self, together: int) -> list[Step]:
        """Return layers and their planes, `together` layers a step; planes are component-major."""
        found = self._steps.get(together)
        if found is None:
            found = self._steps.setdefault(together, self._make_steps(together))
        return found

    def _make_steps(self, together: int) -> list[Step]:
        count, num_planes = len(self.layers), len(self.source.planes)
        steps: list[Step] = []
        for first in range(0, count, together):
            last = min(first + together, count)
            planes = tuple(
                plane for part in range(0, num_planes, count) for plane in range(part + first, part + last)
            )
            steps.append((self.layers[first:last], planes))
        return steps


_pairs: PairMemo[dict[tuple[str, tuple[int, ...]], Pair]] = PairMemo(lambda *_: {})


def pair_of(device: DevicePool, host: HostPool, op: str, layers: tuple[int, ...]) -> Pair:
    """Return the maps of some layers, made once for two pools."""
    known = _pairs(device.row_map(), host.row_map())
    found = known.get((op, layers))
    if found is None:
        ours, theirs = _planes(device, host, layers)
        maps = device.row_map().select(ours), host.row_map().select(theirs)
        found = known.setdefault((op, layers), Pair(*(maps if op == "backup" else maps[::-1]), layers))
    return found


def _planes(device: DevicePool, host: HostPool, layers: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the planes of some layers, component-major, in the device's row map and in the host's."""
    held = _host_layers(device, host)
    parts = range(len(device.geometry.components))
    owned = device.owned_layers
    ours = [part * len(owned) + owned.index(layer) for part in parts for layer in layers]
    theirs = [part * len(held) + held.index(layer) for part in parts for layer in layers]
    return ours, theirs


def _host_layers(device: DevicePool, host: HostPool) -> Sequence[int]:
    """Return the global numbers of the layers that the host pool holds, in its order."""
    if host.owned_layers is not None:
        held: Sequence[int] = host.owned_layers
        fits = host.total_layers == device.geometry.num_layers and set(device.owned_layers) <= set(held)
    elif host.geometry.num_layers == device.geometry.num_layers:
        held, fits = range(host.geometry.num_layers), True
    else:
        held = device.owned_layers
        fits = host.geometry.num_layers == len(held)
    if not fits or host.geometry.with_layers(1) != device.geometry.with_layers(1):
        raise InvalidArgumentError(
            f"the pools do not match: the device pool has {device.geometry} and owns layers "
            f"{list(device.owned_layers)}, the host pool has {host.geometry} and owns layers "
            f"{'all' if host.owned_layers is None else list(host.owned_layers)}. The host pool must hold "
            f"the device pool's layers, or all, and agree in everything else."
        )
    return held
