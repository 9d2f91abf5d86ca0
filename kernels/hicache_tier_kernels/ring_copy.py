"""Copies of pages between a pool and a ring of whole pages, a few at a time.

On a device by the copy kernel where it can be compiled, else by torch; on the CPU by torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from hicache_tier.errors import EngineUnavailableError

from .cuda import CudaEngine, Grid, PreparedKernel
from .engine import DEFAULTS, cuda_device
from .reference import run_reference

if TYPE_CHECKING:
    from .plan import CopyPlan, RowMap

GRID = Grid(64, 1024, 4)
"""Of the kernel between a pool and a ring on the same device: it is short, so it may take many blocks."""


class RingCopy(Protocol):
    """A plan whose pages are copied a few at a time, in order."""

    def submit(self, start: int, count: int) -> None:
        """Copy `count` of the pages from position `start` on; on a device it is enqueued."""


class KernelCopy:
    """Launches of the copy kernel on one stream."""

    def __init__(self, kernel: PreparedKernel, planes: int, stream: torch.cuda.Stream) -> None:
        self._kernel, self._planes, self._stream = kernel, range(planes), stream

    def submit(self, start: int, count: int) -> None:
        """Enqueue some pages."""
        self._kernel.submit_pages(self._planes, start, count, self._stream)


class TorchCopy:
    """Copies by the reference engine; complete on return."""

    def __init__(self, plan: CopyPlan, stream: torch.cuda.Stream | None) -> None:
        self._plan, self._stream = plan, stream

    def submit(self, start: int, count: int) -> None:
        """Copy some pages."""
        part = self._plan.part(slice(start, start + count))
        if self._stream is None:
            run_reference(part)
            return
        with torch.cuda.stream(self._stream):
            run_reference(part)


def ring_copy(plan: CopyPlan, ring: RowMap, stream: torch.cuda.Stream | None) -> RingCopy:
    """Prepare copies between a pool and a ring.

    Parameters
    ----------
    plan : CopyPlan
        One side is `ring`; page numbers on the CPU.
    ring : RowMap
        On the pool's device, or in host memory.
    stream : torch.cuda.Stream, optional
        Where a side is on a device.
    """
    if stream is None or cuda_device(plan) is None:
        return TorchCopy(plan, None)
    engine = CudaEngine()
    if not engine.available(stream.device):
        return TorchCopy(plan, stream)
    if ring.device.type == "cuda":
        kernel = PreparedKernel(plan, ring, stream, GRID, DEFAULTS)
    else:
        try:
            kernel = engine.prepare(plan, stream)
        except EngineUnavailableError:  # memory that could not be pinned
            return TorchCopy(plan, stream)
    return KernelCopy(kernel, len(plan.source.planes), stream)
