"""The engine `copy_engine`: the device's DMA units, by `cuMemcpyBatchAsync`.

They keep the whole link on a busy GPU and cost its kernels next to nothing, but each range costs half a
microsecond to a whole one of a CPU thread, and half of one of the unit: fine for ranges from 32 KiB on where
two threads submit them, slow below.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, ClassVar

import torch

from hicache_tier.errors import EngineUnavailableError

from .driver import driver
from .engine import DEFAULTS, EngineOptions, check_stream, cuda_device, driver_support, reachable, to_host
from .runs import Ranges, fragment_nbytes
from .side import side_of
from .support import Support

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from .plan import CopyPlan
    from .side import Side

    Batch = tuple[NDArray[np.uint64], slice]
    """Ranges `[3, n]`, and which of them go in one call."""

FIRST_BATCH, BATCH = 64, 256
"""Ranges a call: 64 to 1024 measured best on an H200, thousands much worse; few at first, so that the unit
starts on them while the next are handed over."""
RANGE_S, _BATCH_S = 0.45e-6, 20e-6
"""What a range and a call cost the thread that submits."""
LEAST_SHARED = 512
"""Ranges from which on a second thread helps: telling it costs some 50 us."""
STEADY_NBYTES = 128 << 10
"""Below, a range takes the link less than the 1 to 2 us that it may cost the thread which submits it.

How fast the unit is then depends on how busy the machine's cores are (0.97 and 0.7 of a contiguous copy for
64 KiB on two H200 machines of one kind). Longer ranges are submitted by one thread: with more, both
directions at once get less (0.81 of two contiguous copies instead of 0.85)."""


class CopyEngine:
    """Copies by batches of ranges, merged where both sides are contiguous."""

    name: ClassVar[str] = "copy_engine"
    cheap: ClassVar[bool] = False

    def available(self, device: torch.device) -> Support:
        """Return whether the driver has batched copies."""
        if device.type != "cuda":
            return Support(ok=False, reason=f"{device} is not a CUDA device")
        found = driver_support()
        if found and not driver().has_batch_copy:
            return Support(
                ok=False, reason=f"cuMemcpyBatchAsync needs CUDA 12.8, the driver has {driver().version}"
            )
        return found

    def supports(self, plan: CopyPlan) -> Support:
        """Return whether the host side is pinned and the driver has batched copies."""
        found = reachable(plan)
        device = cuda_device(plan)
        return found if not found or device is None else self.available(device)

    def prepare(
        self,
        plan: CopyPlan,
        stream: torch.cuda.Stream,
        options: EngineOptions = DEFAULTS,  # noqa: ARG002 - has no kernel to bound
    ) -> PreparedRanges:
        """Find the runs; waits for page numbers that are on the device."""
        found = self.supports(plan)
        if not found:
            raise EngineUnavailableError(f"{self.name}: {found.reason}.")
        check_stream(plan, stream)
        return PreparedRanges(plan.on_host())


class PreparedRanges:
    """A plan as batches of ranges."""

    by_layer = True
    streams = 1

    def __init__(self, plan: CopyPlan) -> None:
        self._plan = plan
        self._ranges = Ranges(plan)
        self._nbytes = fragment_nbytes(plan.source, plan.destination)

    def seconds(self, planes: Sequence[int]) -> float:
        """Return what a range takes, times their number."""
        count = self._ranges.count(planes)
        return _BATCH_S + RANGE_S * (count // 2 if _shared(count, self._nbytes) else count)

    def submit(self, planes: Sequence[int], stream: torch.cuda.Stream) -> None:
        """Enqueue the ranges of some planes."""
        if self._plan.count:
            with torch.cuda.device(stream.device):
                submit_ranges(self._ranges.of(planes), stream, backup=to_host(self._plan))

    def fault(self) -> Exception | None:
        """Return None: page numbers were checked on the host."""
        return None


def submit_ranges(ranges: NDArray[np.uint64], stream: torch.cuda.Stream, *, backup: bool) -> None:
    """Enqueue ranges in batches, with the help of another thread and another stream where they are many.

    All lie between what `stream` was given before and what it is given next.

    Parameters
    ----------
    ranges : numpy.ndarray
        uint64 `[3, n]`, contiguous: destinations, sources and lengths.
    stream : torch.cuda.Stream
    backup : bool
        Which of the device's two helping threads.
    """
    count = ranges.shape[1]
    batches = deque((ranges, part) for part in batches_of(count))
    if _shared(count, int(ranges[2].sum()) // max(1, count)):
        share_batches(batches, stream, side_of(stream.device, backup))
    else:
        copy_batches(batches, stream)


def _shared(count: int, nbytes: int) -> bool:
    """Return whether so many ranges, of so many bytes each in the mean, are worth two threads."""
    return count >= LEAST_SHARED and nbytes < STEADY_NBYTES


def batches_of(count: int) -> Iterator[slice]:
    """Return which of `count` ranges go in one call each."""
    start, length = 0, FIRST_BATCH
    while start < count:
        yield slice(start, min(start + length, count))
        start, length = start + length, min(2 * length, BATCH)


def share_batches(batches: deque[Batch], stream: torch.cuda.Stream, side: Side) -> None:
    """Enqueue batches by this thread and another, each taking the next: a slow one takes fewer.

    A thread that has not begun when all are taken is not waited for: on a busy machine it may take
    milliseconds to wake up.
    """
    side.stream.wait_stream(stream)
    helping = side.call(copy_batches, batches, side.stream)
    try:
        copy_batches(batches, stream)
    finally:
        batches.clear()  # after a failure here: nothing may go on behind our back
        if not helping.cancel():
            helping.exception()
        stream.wait_stream(side.stream)
    if not helping.cancelled():
        helping.result()


def copy_batches(batches: deque[Batch], stream: torch.cuda.Stream) -> None:
    """Enqueue batches until none is left."""
    handle, copy_batch = stream.cuda_stream, driver().copy_batch
    while True:
        try:
            ranges, part = batches.popleft()
        except IndexError:  # looking first would race with the other thread
            return
        copy_batch(ranges, part, handle)
