"""Copies of pages between a device pool and a host pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_tier_kernels import CopyPlan, run_reference

from .allocator import page_tensor
from .device_pool import DevicePool
from .errors import InvalidArgumentError
from .host_pool import HostPool
from .paths import select_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .paths import Path


@dataclass(frozen=True, slots=True)
class Completion:
    """How far a transfer has come.

    The reference engine has finished by the time it is returned; engines on streams of their own return
    the same shape.

    Attributes
    ----------
    path : Path
        The way the transfer took.
    layers : tuple[int, ...]
        Global numbers of the layers that move.
    pages : int
    nbytes : int
        Bytes that move.
    """

    path: Path
    layers: tuple[int, ...]
    pages: int
    nbytes: int

    def done(self) -> bool:
        """Return whether all bytes have arrived."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Block until all bytes have arrived; raises `TimeoutError` after `timeout` seconds."""

    def wait_layer(self, layer: int, timeout: float | None = None) -> None:  # noqa: ARG002 - see `wait`
        """Block until the bytes of one layer (global number) have arrived."""
        if layer not in self.layers:
            raise InvalidArgumentError(f"layer {layer!r} is not part of this transfer of {self.layers}.")


def backup(
    device: DevicePool,
    host: HostPool,
    device_pages: object,
    host_pages: object,
    io_backend: str = "auto",
) -> Completion:
    """Copy pages from the device to the host, all layers that the device pool owns.

    Parameters
    ----------
    device : DevicePool
    host : HostPool
        Holds all layers of the model, or just those that the device pool owns.
    device_pages, host_pages : torch.Tensor, list or range
        Page numbers, one to one, in any order: int32 or int64 `[n]`. Device pages may repeat.
    io_backend : str
        `auto`, `kernel` or `direct`, see `select_path`.

    Raises
    ------
    UnsupportedTransferError
        Where the path table refuses it.
    InvalidArgumentError
        Where the pools do not match or page numbers are wrong.
    ClosedError
        Where the host pool is closed. In all cases nothing was touched.
    """
    _check_pools(device, host)
    path = transfer_path(device, host, io_backend, "backup")
    ours, theirs = _planes(device, host, device.owned_layers)
    source_pages = page_tensor("device_pages", device_pages)
    destination_pages = page_tensor("host_pages", host_pages)
    with host.in_use():
        source, destination = device.row_map().select(ours), host.row_map().select(theirs)
        plan = CopyPlan(source, destination, source_pages, destination_pages)
        return _run(path, plan, device.owned_layers)


def load(  # noqa: PLR0917 - the contract
    host: HostPool,
    device: DevicePool,
    host_pages: object,
    device_pages: object,
    io_backend: str = "auto",
    layer: int | None = None,
) -> Completion:
    """Copy pages from the host to the device, all owned layers or one.

    Parameters
    ----------
    host : HostPool
    device : DevicePool
    host_pages, device_pages : torch.Tensor, list or range
        As for `backup`; host pages may repeat.
    io_backend : str
    layer : int, optional
        Global number of the one layer to load.

    Raises
    ------
    UnsupportedTransferError, InvalidArgumentError, ClosedError
        As for `backup`; also where `layer` is not one that the device pool owns.
    """
    _check_pools(device, host)
    path = transfer_path(device, host, io_backend, "load")
    layers = device.owned_layers if layer is None else (_owned_layer(device, layer),)
    ours, theirs = _planes(device, host, layers)
    source_pages = page_tensor("host_pages", host_pages)
    destination_pages = page_tensor("device_pages", device_pages)
    with host.in_use():
        source, destination = host.row_map().select(theirs), device.row_map().select(ours)
        plan = CopyPlan(source, destination, source_pages, destination_pages)
        return _run(path, plan, layers)


def transfer_path(device: DevicePool, host: HostPool, io_backend: str, op: str) -> Path:
    """Return the path between two pools; the same for all their pages, so a caller may keep it."""
    return select_path(device.geometry.kind, host.layout, io_backend, sharded=device.sharded, op=op)


def _run(path: Path, plan: CopyPlan, layers: tuple[int, ...]) -> Completion:
    if path.per_layer:
        for number in range(len(layers)):
            run_reference(plan, range(number, len(plan.source.planes), len(layers)))
    else:
        run_reference(plan)
    return Completion(path, layers, len(plan.source_pages), plan.nbytes)


def _check_pools(device: object, host: object) -> None:
    if not isinstance(device, DevicePool) or not isinstance(host, HostPool):
        raise InvalidArgumentError(
            f"a transfer goes between a DevicePool and a HostPool, got {type(device).__name__} as device "
            f"and {type(host).__name__} as host."
        )


def _owned_layer(device: DevicePool, layer: object) -> int:
    if isinstance(layer, bool) or layer not in device.owned_layers:
        raise InvalidArgumentError(
            f"layer {layer!r} is not one that the device pool owns: {list(device.owned_layers)}."
        )
    return device.owned_layers[device.owned_layers.index(layer)]


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
