"""The engine `mixed`: a kernel and the DMA units at once, each with its share of the pages.

A multiprocessor's requests of 128 bytes fill 0.93 of the link with headers counted; the DMA units' larger
ones fill all of it, but lose time at each short range. Side by side they reach more than either where
ranges are of 8 to 64 KiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hicache_tier.errors import EngineUnavailableError

from .copy_engine import CopyEngine
from .cuda import CudaEngine
from .engine import DEFAULTS, EngineOptions, Prepared, check_stream, far_side, near_side, new_stream
from .runs import fragment_nbytes
from .support import Support

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .plan import CopyPlan

SHARES = ((64 << 10, 0.6), (32 << 10, 0.45), (16 << 10, 0.25), (8 << 10, 0.12), (4 << 10, 0.06))
"""Bytes of a range from which on the DMA units get that share of the pages; measured on an H200."""


class MixedEngine:
    """Copies some pages by the engine `copy_engine` and the others by `cuda`."""

    name: ClassVar[str] = "mixed"
    cheap: ClassVar[bool] = False

    def __init__(self) -> None:
        self._dma, self._kernel = CopyEngine(), CudaEngine()

    def available(self, device: torch.device) -> Support:
        """Return whether both engines can run."""
        return self._dma.available(device) and self._kernel.available(device)

    def supports(self, plan: CopyPlan) -> Support:
        """Return whether both engines can run the plan and its ranges are long enough to share."""
        found = self._dma.supports(plan) and self._kernel.supports(plan)
        if found and not share_of(plan):
            return Support(ok=False, reason="too few pages, or ranges too short, for DMA to have a share")
        return found

    def prepare(
        self, plan: CopyPlan, stream: torch.cuda.Stream, options: EngineOptions = DEFAULTS
    ) -> PreparedShares:
        """Prepare both shares; waits for page numbers that are on the device."""
        found = self.supports(plan)
        if not found:
            raise EngineUnavailableError(f"{self.name}: {found.reason}.")
        check_stream(plan, stream)
        whole = plan.on_host()
        cut = share_of(whole)
        dma = self._dma.prepare(whole.part(slice(0, cut)), stream, options)
        kernel = self._kernel.prepare(whole.part(slice(cut, None)), stream, options)
        return PreparedShares(dma, kernel, stream.device)


class PreparedShares:
    """Two prepared plans that are submitted together."""

    by_layer = True
    streams = 2

    def __init__(self, dma: Prepared, kernel: Prepared, device: torch.device) -> None:
        self._dma, self._kernel = dma, kernel
        self._side = new_stream(device)

    def submit(self, planes: Sequence[int], stream: torch.cuda.Stream) -> None:
        """Enqueue both shares; `stream` goes on when both are done."""
        self._side.wait_stream(stream)
        self._kernel.submit(planes, stream)
        self._dma.submit(planes, self._side)
        stream.wait_stream(self._side)

    def fault(self) -> Exception | None:
        """Return None: page numbers were checked on the host."""
        return None


def share_of(plan: CopyPlan) -> int:
    """Return how many of the pages the DMA units get."""
    nbytes = fragment_nbytes(near_side(plan), far_side(plan))
    share = next((part for least, part in SHARES if nbytes >= least), 0.0)
    return round(share * len(plan.source_pages))
