"""Copies of pages between a device pool and a host pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_tier_kernels import EngineOptions, engine_named, run_reference

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

    from .pairing import Pair, Turn
    from .paths import Capabilities, Path

__all__ = ["Completion", "TransferOptions", "backup", "explain", "load", "transfer_path"]

GROUP_NBYTES = (2 << 20, 8 << 20)
GROUPS = 8
"""Small layers of a load go, and arrive, together: an eighth of the transfer, within these bounds."""
BACKUP_GROUP_NBYTES = 128 << 20
"""Nobody waits for single layers of a backup: an eighth of it goes together, or so much, and what lies
together on the host is written in a row."""


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
_ENGINE_DEFAULTS = _DEFAULTS.for_engine()


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
    turn = pair_of(device, host, op, device.owned_layers).turn(ours, theirs, check=True)
    return _choose(device, host, turn, device.owned_layers, path, io_backend, options)


def _transfer(  # noqa: PLR0917 - internal, what `backup` and `load` have in common
    device: DevicePool,
    host: HostPool,
    op: str,
    layers: tuple[int, ...],
    pages: tuple[torch.Tensor, torch.Tensor],
    io_backend: str,
    options: TransferOptions,
) -> Completion:
    pair = pair_of(device, host, op, device.owned_layers)
    path = pair.paths.get(io_backend)
    if path is None:
        path = pair.paths.setdefault(io_backend, transfer_path(device, host, io_backend, op))
    host.begin_use()
    try:
        turn = pair.turn(*pages, check=options.check_indices)
        count = turn.plan.count
        if count and path.engine != "reference":
            path = _choose(device, host, turn, layers, path, io_backend, options)
            nbytes = count * pair.page_nbytes(layers)
            completion = StreamCompletion(path, layers, count, nbytes, host.end_use)
        else:
            _run_reference(path, pair, turn, layers, options)
            host.end_use()
            return Completion(path, layers, count, count * pair.page_nbytes(layers))
    except BaseException:
        host.end_use()
        raise
    _start(pair, turn, options, completion)
    return completion


def _run_reference(
    path: Path, pair: Pair, turn: Turn, layers: tuple[int, ...], options: TransferOptions
) -> None:
    if not turn.plan.count:
        return
    if options.engine not in {None, path.engine}:
        raise InvalidArgumentError(f"engine {options.engine!r} cannot run here: {path.reason}.")
    for _, planes in pair.steps(layers, 1 if path.per_layer else len(layers)):
        run_reference(turn.plan, planes)


def _choose(  # noqa: PLR0917 - internal
    device: DevicePool,
    host: HostPool,
    turn: Turn,
    layers: tuple[int, ...],
    path: Path,
    io_backend: str,
    options: TransferOptions,
) -> Path:
    """Return the path for page numbers; layers are alike, so the first stands for any one."""
    key = io_backend, options.engine, len(layers) > 1
    found = turn.paths.get(key)
    if found is None:
        some = pair_of(device, host, path.op, layers if len(layers) > 1 else device.owned_layers[:1])
        found = choose_path(some, turn.plan, path, io_backend, _capabilities(device, host), options.engine)
        turn.paths[key] = found
    return found


def _start(pair: Pair, turn: Turn, options: TransferOptions, completion: StreamCompletion) -> None:
    path, layers = completion.path, completion.layers
    engine = engine_named(path.engine)
    together = _together(len(layers), completion.nbytes, backup=path.op == "backup", cheap=engine.cheap)
    device = (pair.source if path.op == "backup" else pair.destination).device
    asked = _ENGINE_DEFAULTS if options is _DEFAULTS else options.for_engine()
    lane_of(device, path.op).start(Job(engine, turn, pair.steps(layers, together), asked, completion))


def _together(count: int, nbytes: int, *, backup: bool, cheap: bool) -> int:
    """Return how many of `count` layers go in one step."""
    if count == 1 or (backup and cheap):  # one launch
        return count
    low, high = GROUP_NBYTES
    least = min(max(low, nbytes // GROUPS), BACKUP_GROUP_NBYTES if backup else high)
    return min(count, -(-least * count // nbytes))


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
