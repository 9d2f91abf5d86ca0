"""Copies of pages between a device pool and a host pool."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_tier_kernels import CopyPlan, EngineOptions, engine_named, run_reference

from .allocator import page_tensor
from .completion import Completion, StreamCompletion
from .device_pool import DevicePool
from .errors import InvalidArgumentError
from .host_pool import HostPool
from .lanes import Job, lane_of
from .machine import machine_capabilities
from .pairing import pair_of
from .paths import select_path
from .routing import choose_path

if TYPE_CHECKING:
    import torch

    from .pairing import Pair
    from .paths import Capabilities, Path

__all__ = ["Completion", "TransferOptions", "backup", "explain", "load", "transfer_path"]

GROUP_NBYTES = 2 << 20
"""Least bytes of one submission of a load; smaller layers go together, and arrive together."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Options of `backup` and `load`.

    Attributes
    ----------
    max_sms : int, optional
        Multiprocessors that a kernel which reads or writes host memory may take; where left out, as many as
        measured best on an H200: 8 for loads, 4 for backups.
    check_indices : bool
        Whether page numbers are checked for range and repetition before anything is copied: those on the
        host in the call, those on the device by a small kernel, whose verdict the completion raises.
        Without, a wrong number is an illegal access.
    engine : str, optional
        One engine of those the backend allows; chosen by measurement where left out.
    """

    max_sms: int | None = None
    check_indices: bool = True
    engine: str | None = None

    def for_engine(self) -> EngineOptions:
        """Return what engines take."""
        return EngineOptions(self.max_sms, self.check_indices)


_DEFAULTS = TransferOptions()


def backup(
    device: DevicePool,
    host: HostPool,
    device_pages: object,
    host_pages: object,
    io_backend: str = "auto",
    *,
    options: TransferOptions = _DEFAULTS,
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
    options : TransferOptions

    Returns
    -------
    Completion
        On a CUDA device the copy comes after all work that the current stream has been given, and goes on
        beside what it is given next. Pages of both pools belong to it until `done()`.

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
    pages = page_tensor("device_pages", device_pages), page_tensor("host_pages", host_pages)
    return _transfer(device, host, "backup", device.owned_layers, pages, io_backend, options)


def load(  # noqa: PLR0917 - the contract
    host: HostPool,
    device: DevicePool,
    host_pages: object,
    device_pages: object,
    io_backend: str = "auto",
    layer: int | None = None,
    *,
    options: TransferOptions = _DEFAULTS,
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
    options : TransferOptions

    Returns
    -------
    Completion
        As of `backup`; on a CUDA device layers arrive one after another, so that a stream can compute layer
        n while n + 1 loads (`wait_layer_on`).

    Raises
    ------
    UnsupportedTransferError, InvalidArgumentError, ClosedError
        As for `backup`; also where `layer` is not one that the device pool owns.
    """
    _check_pools(device, host)
    layers = device.owned_layers if layer is None else (_owned_layer(device, layer),)
    pages = page_tensor("host_pages", host_pages), page_tensor("device_pages", device_pages)
    return _transfer(device, host, "load", layers, pages, io_backend, options)


def transfer_path(device: DevicePool, host: HostPool, io_backend: str, op: str) -> Path:
    """Return the path between two pools; the same for all their pages, so a caller may keep it.

    Its engine is the first that can run here; which one takes a transfer depends on its pages (`explain`).
    """
    able = _capabilities(device, host)
    kind, sharded = device.geometry.kind, device.sharded
    return select_path(kind, host.layout, io_backend, sharded=sharded, op=op, capabilities=able)


def explain(  # noqa: PLR0917 - as `backup` and `load`
    device: DevicePool,
    host: HostPool,
    op: str,
    device_pages: object,
    host_pages: object,
    io_backend: str = "auto",
    *,
    options: TransferOptions = _DEFAULTS,
) -> Path:
    """Return the path that a transfer would take, with engine and reason; nothing is copied."""
    _check_pools(device, host)
    path = transfer_path(device, host, io_backend, op)
    ours, theirs = page_tensor("device_pages", device_pages), page_tensor("host_pages", host_pages)
    if op == "load":
        ours, theirs = theirs, ours
    pair = pair_of(device, host, op, device.owned_layers)
    plan = CopyPlan(pair.source, pair.destination, ours, theirs)
    return choose_path(pair, plan, path, io_backend, _capabilities(device, host), options.engine)


def _transfer(  # noqa: PLR0917 - internal, what `backup` and `load` have in common
    device: DevicePool,
    host: HostPool,
    op: str,
    layers: tuple[int, ...],
    pages: tuple[torch.Tensor, torch.Tensor],
    io_backend: str,
    options: TransferOptions,
) -> Completion:
    path = transfer_path(device, host, io_backend, op)
    with ExitStack() as held:
        held.enter_context(host.in_use())
        pair = pair_of(device, host, op, layers)
        plan = CopyPlan(pair.source, pair.destination, *pages, check_indices=options.check_indices)
        if path.engine != "reference" and plan.count:
            path = choose_path(pair, plan, path, io_backend, _capabilities(device, host), options.engine)
            completion = StreamCompletion(path, layers, plan.count, plan.nbytes, held.pop_all().close)
            _start(path, pair, plan, options, completion)
            return completion
        if options.engine not in {None, path.engine} and plan.count:
            raise InvalidArgumentError(f"engine {options.engine!r} cannot run here: {path.reason}.")
        if not plan.count:
            return Completion(path, layers, 0, 0)
        for _, planes in pair.steps(1 if path.per_layer else len(layers)):
            run_reference(plan, planes)
        return Completion(path, layers, plan.count, plan.nbytes)


def _start(
    path: Path,
    pair: Pair,
    plan: CopyPlan,
    options: TransferOptions,
    completion: StreamCompletion,
) -> None:
    engine = engine_named(path.engine)
    if not engine.cheap:  # another thread reads them while the caller goes on
        plan = plan.with_own_pages()
    count = len(pair.layers)
    together = max(1, min(count, -(-GROUP_NBYTES * count // max(1, plan.nbytes))))
    if engine.cheap and path.op == "backup":  # nobody waits for single layers: one launch
        together = count
    device = plan.source.device if path.op == "backup" else plan.destination.device
    lane_of(device, path.op).start(Job(engine, plan, pair.steps(together), options.for_engine(), completion))


def _capabilities(device: DevicePool, host: HostPool) -> Capabilities:
    return machine_capabilities(device.device, pinned=host.pinned)


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
