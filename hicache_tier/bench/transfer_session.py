"""One session of `bench transfer`: what is measured, in which order, into one result."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hicache_tier.errors import InvalidArgumentError

from .errors import BenchError
from .transfer_busy import BusyBench
from .transfer_cases import Selection, grouped
from .transfer_clock import CudaClock, Link, make_clock
from .transfer_peers import MemcpyLoop
from .transfer_runs import TransferBench
from .transfer_sglang import SglangKernels, missing
from .transfer_targets import target_cases, target_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .transfer_cases import TransferCase
    from .transfer_peers import Peer

_BUFFER_NBYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
_DEVICES = "auto, cpu, cuda, cuda:N"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the caller wants.

    Attributes
    ----------
    axes : mapping
        Chosen values of the axes of `Selection`; an empty one leaves the default.
    full, targets, busy : bool
        The whole matrix; the lines of the table of targets; beside matrix products instead of idle.
    engine : str, optional
        The only engine that may run a case.
    peers : sequence of str
        Of `transfer_cases.PEERS`.
    device : str
        `auto`, `cpu`, `cuda`, `cuda:1`, ...
    repeats : int
    buffer_nbytes : int, optional
        Least size of pools and of the buffers of C.
    """

    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    full: bool = False
    targets: bool = False
    busy: bool = False
    engine: str | None = None
    peers: Sequence[str] = ()
    device: str = "auto"
    repeats: int = 7
    buffer_nbytes: int | None = None


class Session:
    """Measures what was wished for.

    Raises
    ------
    InvalidArgumentError
        For a device that cannot be had, or a case that is none.
    BenchError
        Where `busy` or `targets` are asked for without a GPU.
    """

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self.device = find_device(wish.device)
        cuda = self.device.type == "cuda"
        if wish.busy and not cuda:
            raise BenchError("--busy needs a CUDA device: it measures what transfers cost products on a GPU.")
        if wish.targets and not cuda:
            raise BenchError("--targets needs a CUDA device: its figures are those of an H200.")
        self._idle, self._beside = self._cases(cuda=cuda)
        self._notes: list[str] = []

    def __len__(self) -> int:
        """Cases that will be measured."""
        return len(self._idle) + len(self._beside)

    def _cases(self, *, cuda: bool) -> tuple[list[TransferCase], list[TransferCase]]:
        if self._wish.targets:
            return target_cases(busy=False), target_cases(busy=True) if cuda else []
        start = Selection.full() if self._wish.full else Selection.default(cuda=cuda)
        cases = start.but(**self._wish.axes).cases()
        if self._wish.busy:
            cases = [case for case in cases if len(case.direction.moves) == 1]
        return ([], cases) if self._wish.busy else (cases, [])

    def run(self, tick: Callable[[], None]) -> dict[str, Any]:
        """Measure everything, or as much as there is time for before Ctrl-C; `tick` is called once a case.

        Returns
        -------
        dict
            Keys: `c`, `c_is`, `rows`, `busy`, `peers`, `targets`, `skipped`, `notes`, `interrupted`, `host`.
        """
        wish, clock = self._wish, make_clock(self.device)
        size = wish.buffer_nbytes or _BUFFER_NBYTES[self.device.type]
        link = Link(clock, size)
        c = {name: link.gb_s(name, wish.repeats) for name in ("h2d", "d2h")}
        bench = TransferBench(clock, link, wish.engine, self._peers(), wish.repeats, size, tick)
        busy = BusyBench(clock, link, wish.engine, size, tick) if isinstance(clock, CudaClock) else None
        interrupted = False
        try:
            for cases in grouped(self._beside):
                if busy is not None:
                    busy.run(cases)
            for cases in grouped(self._idle):
                bench.run(cases)
        except KeyboardInterrupt:
            interrupted = True
        busy_rows, skipped = (busy.rows, busy.skipped) if busy is not None else ([], [])
        return {
            "c": c,
            "c_is": _what_c_is(self.device),
            "rows": bench.rows,
            "busy": busy_rows,
            "peers": bench.peer_rows,
            "targets": target_rows(bench.rows, busy_rows, bench.peer_rows) if wish.targets else [],
            "skipped": bench.skipped + skipped,
            "notes": self._notes,
            "interrupted": interrupted,
            "host": host_facts(self.device),
        }

    def _peers(self) -> list[Peer]:
        found: list[Peer] = []
        for name in dict.fromkeys(self._wish.peers):
            why_not = missing() if name == "sglang" else None
            if name == "memcpy-loop" and self.device.type != "cuda":
                why_not = "it needs a CUDA device"
            if why_not:
                self._notes.append(f"Peer {name} was not run: {why_not}.")
            else:
                found.append(SglangKernels() if name == "sglang" else MemcpyLoop())
        return found


def host_facts(device: torch.device) -> dict[str, Any]:
    """Return what the figures were measured on."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
    }


def _what_c_is(device: torch.device) -> str:
    if device.type == "cuda":
        return "a contiguous copy of pinned memory"
    return "a plain copy of a tensor (no GPU: both directions are copies within host memory)"


def find_device(name: str) -> torch.device:
    """Return the device of a name; raises `InvalidArgumentError` where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgumentError(f"device {name!r} is not known. Allowed: {_DEVICES}.") from error
    if device.type not in _BUFFER_NBYTES:
        raise InvalidArgumentError(f"device {name!r} cannot be measured. Allowed: {_DEVICES}.")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        number = device.index or 0
        if number >= count:
            raise InvalidArgumentError(f"device {name!r} is not there: there are {count} CUDA devices.")
        return torch.device("cuda", number)
    return device
