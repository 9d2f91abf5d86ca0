"""Which of the optional engines, `nixl` and `kvikio`, work for a directory, and why others do not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .cufile_library import facts, why_no_gpudirect
from .kvikio_package import compat_mode, missing_library, why_no_kvikio
from .medium import filesystem
from .nixl_lane import GPU_PLUGINS, QUEUES
from .nixl_package import why_no_nixl
from .trials import DEADLINE_S, Trial, try_all

if TYPE_CHECKING:
    from collections.abc import Sequence

_GOOD = "a small aligned write and read came back equal"
GPUDIRECT = "GPU memory, GPUDirect"
_URING_SWITCH = Path("/proc/sys/kernel/io_uring_disabled")
_AIO_USED, _AIO_LIMIT = Path("/proc/sys/fs/aio-nr"), Path("/proc/sys/fs/aio-max-nr")


class Finding(NamedTuple):
    """An engine and mode; whether it works there, and why (not)."""

    engine: str
    mode: str
    usable: bool
    reason: str


def nixl_posix(directory: Path, *, direct: bool) -> list[Finding]:
    """Try NIXL's POSIX plug-in with each of its queues."""
    why = why_no_nixl()
    verdicts = [why] * len(QUEUES) if why else try_all(_queues(directory, direct=direct))
    how = f"{filesystem(directory)}, {'O_DIRECT' if direct else 'buffered'}"
    found = []
    for queue, verdict in zip(QUEUES, verdicts, strict=True):
        reason = _with_cause(queue, verdict) if verdict else f"{how}: {_GOOD}"
        found.append(Finding("nixl", f"POSIX {queue}", not verdict, reason))
    return found


def nixl_gpu(directory: Path, *, direct: bool) -> list[Finding]:
    """Try NIXL's plug-ins with GPU memory."""
    why = _why_no_gpu_plugin()
    if why:
        return [Finding("nixl", plugin, usable=False, reason=why) for plugin in GPU_PLUGINS]
    verdicts = try_all(_plugins(directory, direct=direct))
    return [
        Finding("nixl", plugin, not verdict, _with_facts(verdict or f"GPU memory: {_GOOD}"))
        for plugin, verdict in zip(GPU_PLUGINS, verdicts, strict=True)
    ]


def _why_no_gpu_plugin() -> str:
    return why_no_nixl() or missing_library("libcuda.so.1", "no NVIDIA driver")


def _queues(directory: Path, *, direct: bool) -> list[Trial]:
    return [Trial("nixl_posix", directory, {"queue": queue, "direct": direct}) for queue in QUEUES]


def _plugins(directory: Path, *, direct: bool) -> list[Trial]:
    return [Trial("nixl_gpu", directory, {"plugin": plugin, "direct": direct}) for plugin in GPU_PLUGINS]


def kvikio_host(directory: Path) -> list[Finding]:
    """Try kvikio with host memory."""
    return [_kvikio(Trial("kvikio_host", directory), "host memory")]


def kvikio_gpudirect(directory: Path) -> Finding:
    """Try kvikio with GPU memory where cuFile may not copy through host memory."""
    why = why_no_kvikio() or why_no_gpudirect(directory)
    if why:
        return Finding("kvikio", GPUDIRECT, usable=False, reason=why)
    (verdict,) = try_all([Trial("kvikio_gpudirect", directory)])
    return Finding("kvikio", GPUDIRECT, not verdict, verdict or _GOOD)


def kvikio_gpu(directory: Path) -> list[Finding]:
    """Try kvikio with GPU memory, without and with cuFile's copies through host memory."""
    return [kvikio_gpudirect(directory), _kvikio(Trial("kvikio_gpu", directory), "GPU memory")]


def _kvikio(trial: Trial, mode: str) -> Finding:
    why = why_no_kvikio()
    if why:
        return Finding("kvikio", mode, usable=False, reason=why)
    (verdict,) = try_all([trial])
    how = mode if verdict else f"{mode}, compat mode {compat_mode()}"
    return Finding("kvikio", how, not verdict, _with_facts(verdict or _GOOD))


def _with_facts(reason: str) -> str:
    """Add what decides between true GPUDirect, compatibility mode, and none."""
    return "; ".join([reason, *facts()])


def device_findings(directory: Path, *, direct: bool = True) -> list[Finding]:
    """Try everything that moves GPU memory in a directory that exists, best first."""
    return [*kvikio_gpu(directory), *nixl_gpu(directory, direct=direct)]


def chosen_for_devices(findings: Sequence[Finding]) -> Finding | None:
    """Return what `auto` takes for GPU memory: kvikio, where cuFile reaches the disk without the host.

    Where it would copy through host memory itself, staging there by `posix` measured faster.
    """
    return next((found for found in findings if found.mode == GPUDIRECT and found.usable), None)


def _with_cause(queue: str, verdict: str) -> str:
    """Add what the kernel says about a queue that does not work."""
    try:
        if queue == "io_uring":
            switch = int(_URING_SWITCH.read_text())
            cause = f" (kernel.io_uring_disabled = {switch})" if switch else ""
        else:
            used, limit = int(_AIO_USED.read_text()), int(_AIO_LIMIT.read_text())
            cause = f" (fs.aio-nr {used} of {limit})"
    except (OSError, ValueError):
        cause = ""
    return verdict + cause


def all_findings(directory: Path, *, direct: bool, refused: str) -> list[Finding]:
    """Try everything that is optional in a directory that exists; `refused`: why nothing can work there."""
    if refused:
        modes = [("nixl", f"POSIX {queue}") for queue in QUEUES]
        modes += [("nixl", plugin) for plugin in GPU_PLUGINS]
        modes += [("kvikio", mode) for mode in ("host memory", GPUDIRECT, "GPU memory")]
        return [Finding(*row, usable=False, reason=refused) for row in modes]
    trials: list[Trial] = []  # side by side: most of the time goes into starting processes
    if not why_no_nixl():
        trials += _queues(directory, direct=direct)
    if not _why_no_gpu_plugin():
        trials += _plugins(directory, direct=direct)
    if not why_no_kvikio():
        trials += [Trial("kvikio_host", directory), Trial("kvikio_gpu", directory)]
    try_all(trials, 2 * DEADLINE_S)
    return [
        *nixl_posix(directory, direct=direct),
        *nixl_gpu(directory, direct=direct),
        *kvikio_host(directory),
        *kvikio_gpu(directory),
    ]
