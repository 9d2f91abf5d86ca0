"""Two pools seen together: which planes belong to each other, and what was made ready for copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_tier_kernels import CopyPlan
from hicache_tier_kernels.memo import PairMemo

from .errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_tier_kernels import EngineOptions, Prepared, RowMap

    from .device_pool import DevicePool
    from .host_pool import HostPool
    from .lanes import Step
    from .paths import Path


_NAMES = ("device_pages", "host_pages")


@dataclass(frozen=True, slots=True)
class Turn:
    """Page numbers that were checked, and what engines made ready for them.

    An engine that loads layer by layer gives the same numbers again and again; whatever was found out about
    them holds for all of these calls.

    Attributes
    ----------
    plan : CopyPlan
        Of all layers that the device pool owns; page numbers on the CPU are copies of its own.
    raw : tuple[bytes, bytes], optional
        The bytes of both lists of page numbers; None where some are on the device.
    prepared : dict
        By engine and options.
    paths : dict
        By backend, engine asked for, and whether all layers go together.
    """

    plan: CopyPlan
    raw: tuple[bytes, bytes] | None = None
    prepared: dict[tuple[str, EngineOptions], Prepared] = field(default_factory=dict)
    paths: dict[tuple[str, str | None, bool], Path] = field(default_factory=dict)

    def is_for(self, ours: torch.Tensor, theirs: torch.Tensor, *, checked: bool) -> bool:
        """Return whether these are the same page numbers, and were checked if they must be."""
        plan = self.plan
        return (
            (plan.check_indices or not checked)
            and ours.dtype == plan.source_pages.dtype
            and theirs.dtype == plan.destination_pages.dtype
            and self.raw == (_raw(ours), _raw(theirs))
        )


@dataclass(slots=True, eq=False)
class Pair:
    """The row maps of some layers of two pools, and what was found out about copies between them.

    Attributes
    ----------
    source, destination : RowMap
    layers : tuple[int, ...]
        Global numbers.
    names : tuple[str, str]
        What callers call page numbers of the source and of the destination.
    paths : dict
        What the path table says, by backend, and paths that were chosen, by the kind of pages.
    """

    source: RowMap
    destination: RowMap
    layers: tuple[int, ...]
    names: tuple[str, str]
    paths: dict[object, Path] = field(default_factory=dict)
    _steps: dict[tuple[tuple[int, ...], int], list[Step]] = field(default_factory=dict)
    _last: Turn | None = None

    def turn(self, source_pages: torch.Tensor, destination_pages: torch.Tensor, *, check: bool) -> Turn:
        """Check page numbers and return what is known of them: the last ones are remembered.

        Raises
        ------
        InvalidArgumentError
            As `CopyPlan`.
        """
        pages = source_pages, destination_pages
        if source_pages.device.type != "cpu" or destination_pages.device.type != "cpu":
            # Those cannot be compared without waiting for the device.
            ours, theirs = (index.clone() if index.device.type == "cpu" else index for index in pages)
            return Turn(CopyPlan(self.source, self.destination, ours, theirs, check, self.names))
        last = self._last
        if last is not None and last.is_for(*pages, checked=check):
            return last
        ours, theirs = source_pages.clone(), destination_pages.clone()  # the caller may write over his
        plan = CopyPlan(self.source, self.destination, ours, theirs, check, self.names)
        self._last = turn = Turn(plan, (_raw(ours), _raw(theirs)))
        return turn

    def page_nbytes(self, layers: tuple[int, ...]) -> int:
        """Return the bytes of one page in some of the layers."""
        return self.source.page_nbytes * len(layers) // len(self.layers)

    def steps(self, layers: tuple[int, ...], together: int) -> list[Step]:
        """Return some of the layers and their planes, `together` layers a step; planes component-major."""
        found = self._steps.get((layers, together))
        if found is None:
            found = self._steps.setdefault((layers, together), self._make_steps(layers, together))
        return found

    def _make_steps(self, layers: tuple[int, ...], together: int) -> list[Step]:
        count, num_planes = len(self.layers), len(self.source.planes)
        places = [self.layers.index(layer) for layer in layers]
        steps: list[Step] = []
        for first in range(0, len(layers), together):
            mine = slice(first, first + together)
            planes = tuple(part + place for part in range(0, num_planes, count) for place in places[mine])
            steps.append((layers[mine], planes))
        return steps


_pairs: PairMemo[dict[tuple[str, tuple[int, ...]], Pair]] = PairMemo(lambda *_: {})


def pair_of(device: DevicePool, host: HostPool, op: str, layers: tuple[int, ...]) -> Pair:
    """Return the maps of some layers, made once for two pools."""
    known = _pairs(device.row_map(), host.row_map())
    found = known.get((op, layers))
    if found is None:
        ours, theirs = _planes(device, host, layers)
        maps, names = (device.row_map().select(ours), host.row_map().select(theirs)), _NAMES
        if op == "load":
            maps, names = maps[::-1], names[::-1]
        found = known.setdefault((op, layers), Pair(*maps, layers, names))
    return found


def _raw(pages: torch.Tensor) -> bytes:
    """Return page numbers as bytes; a comparison by torch would let other threads go first."""
    return pages.numpy().tobytes()


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
