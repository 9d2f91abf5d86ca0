"""Which of the optional engines, `nixl` and `kvikio`, work for a directory, and why others do not."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .kvikio_package import why_no_kvikio
from .medium import filesystem
from .nixl_lane import QUEUES
from .nixl_package import why_no_nixl
from .trials import Trial, try_all

_GOOD = "a small aligned write and read came back equal"
_URING_SWITCH = Path("/proc/sys/kernel/io_uring_disabled")
_AIO_USED, _AIO_LIMIT = Path("/proc/sys/fs/aio-nr"), Path("/proc/sys/fs/aio-max-nr")
_GDS_PLUGINS = ("GDS_MT", "GDS")


class Finding(NamedTuple):
    """An engine and mode; whether it works there, and why (not)."""

    engine: str
    mode: str
    usable: bool
    reason: str


def nixl_posix(directory: Path, *, direct: bool) -> list[Finding]:
    """Try NIXL's POSIX plug-in with each of its queues."""
    why = why_no_nixl()
    trials = [Trial("nixl_posix", directory, {"queue": queue, "direct": direct}) for queue in QUEUES]
    verdicts = [why] * len(QUEUES) if why else try_all(trials)
    how = f"{filesystem(directory)}, {'O_DIRECT' if direct else 'buffered'}"
    found = []
    for queue, verdict in zip(QUEUES, verdicts, strict=True):
        reason = _with_cause(queue, verdict) if verdict else f"{how}: {_GOOD}"
        found.append(Finding("nixl", f"POSIX {queue}", not verdict, reason))
    return found


def nixl_gds(directory: Path) -> list[Finding]:
    """Say what stands in the way of NIXL's plug-ins for GPU memory."""
    why = why_no_nixl()
    trials = [Trial("nixl_gds", directory, {"plugin": plugin}) for plugin in _GDS_PLUGINS]
    verdicts = [why] * len(trials) if why else try_all(trials)
    return [
        Finding("nixl", plugin, usable=False, reason="; ".join([verdict, *_gpu_facts()]))
        for plugin, verdict in zip(_GDS_PLUGINS, verdicts, strict=True)
    ]


def kvikio(directory: Path) -> list[Finding]:
    """Try kvikio with host memory."""
    why = why_no_kvikio()
    if not why:
        (why,) = try_all([Trial("kvikio_host", directory)])
    reason = "; ".join([why or _GOOD, *_gpu_facts()])
    return [Finding("kvikio", "host memory", not why, reason)]


def _gpu_facts() -> list[str]:
    """Say what decides between true GPUDirect, compatibility mode, and none."""
    facts = []
    if not Path("/proc/driver/nvidia-fs").exists():
        facts.append("no nvidia-fs driver (GPUDirect would run in compatibility mode)")
    if not Path("/run/udev").is_dir():
        facts.append("no /run/udev (cuFile cannot tell the file system)")
    return facts


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
        modes = [("nixl", f"POSIX {queue}") for queue in QUEUES] + [("nixl", p) for p in _GDS_PLUGINS]
        return [Finding(*row, usable=False, reason=refused) for row in [*modes, ("kvikio", "host memory")]]
    return [*nixl_posix(directory, direct=direct), *nixl_gds(directory), *kvikio(directory)]
