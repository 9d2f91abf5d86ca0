"""The engine `staged`: whole windows of host memory by DMA, rearranged on the device by a short kernel.

A window is a stretch of host memory that holds one page of several planes and nothing else: the page of a
component, where the layout keeps it together. Windows go through slots of a ring on the device, so that the
DMA of one slot runs beside the kernels of the others. The kernels move bytes at the speed of device memory
on a stream of high priority; on a busy GPU each may wait for a running kernel to leave (1.5 ms behind a
matrix product of 8192^3 on an H200), which is what the ring's size hides: 55 GB/s x 1.5 ms = 83 MB.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from hicache_tier.errors import EngineUnavailableError

from .copy_engine import RANGE_S, CopyEngine, submit_ranges
from .cuda import CudaEngine, Grid, PreparedKernel
from .engine import (
    DEFAULTS,
    EngineOptions,
    check_stream,
    cuda_device,
    far_side,
    near_side,
    new_event,
    new_stream,
    reachable,
    to_host,
)
from .indices import can_be_inline
from .memo import PairMemo
from .plan import CopyPlan, RowMap, byte_plane
from .support import Support

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .indices import Numbers

SLOT_NBYTES = 64 << 20
SLOTS = 4
LEAST_NBYTES = 2 << 20
"""Least bytes of one step where there are enough: smaller transfers are still cut into several."""
LEAST_STEPS = 4
_STEP_S = 40e-6
"""What one slot's DMA call, launch and events cost the thread that submits."""
GRID = Grid(132, 1024, 4)
"""Of the rearranging kernel: a block for each multiprocessor of an H200.

It is short, and the shorter it holds each of them, the less a product that runs beside it waits for its last
block: 0.05 slower than beside a bare copy, 0.08 with 64 blocks of this size or with 32."""


@dataclass(frozen=True, slots=True)
class Window:
    """Host bytes that hold one page of some planes without gaps: `base + page * nbytes`."""

    base: int
    nbytes: int
    planes: tuple[int, ...]


def find_windows(near: RowMap, far: RowMap) -> tuple[Window, ...]:  # noqa: ARG001 - as PairMemo calls it
    """Return the windows of the host side; none where pages of some plane lie between other bytes."""
    numbers = sorted(range(len(near.planes)), key=lambda number: near.planes[number].data_ptr())
    windows: list[Window] = []
    while numbers:
        base, page = near.planes[numbers[0]].data_ptr(), near.planes[numbers[0]].stride(0)
        mine = [n for n in numbers if near.planes[n].data_ptr() < base + page]
        if any(near.planes[n].stride(0) != page for n in mine):
            return ()
        if sum(near.planes[n][0].numel() for n in mine) != page:
            return ()
        windows.append(Window(base, page, tuple(sorted(mine))))
        numbers = numbers[len(mine) :]
    return tuple(windows)


windows_of = PairMemo(find_windows)
"""`find_windows`, remembered."""


class StagedEngine:
    """Copies whole windows by DMA through a ring on the device."""

    name: ClassVar[str] = "staged"
    cheap: ClassVar[bool] = False

    def __init__(self) -> None:
        self._dma, self._kernel = CopyEngine(), CudaEngine()

    def available(self, device: torch.device) -> Support:
        """Return whether both the DMA and the kernel can run."""
        return self._dma.available(device) and self._kernel.available(device)

    def supports(self, plan: CopyPlan) -> Support:
        """Return whether pages fill windows of host memory."""
        found = reachable(plan)
        device = cuda_device(plan)
        if not found or device is None:
            return found
        windows = windows_of(near_side(plan), far_side(plan))
        if not windows:
            return Support(ok=False, reason="pages do not fill stretches of host memory of their own")
        if max(window.nbytes for window in windows) > SLOT_NBYTES:
            return Support(ok=False, reason=f"a page has more than the {SLOT_NBYTES} bytes of a slot")
        return self.available(device)

    def prepare(
        self, plan: CopyPlan, stream: torch.cuda.Stream, options: EngineOptions = DEFAULTS
    ) -> PreparedWindows:
        """Find the windows; waits for page numbers that are on the device."""
        found = self.supports(plan)
        if not found:
            raise EngineUnavailableError(f"{self.name}: {found.reason}.")
        check_stream(plan, stream)
        return PreparedWindows(plan.on_host(), stream, options)


class PreparedWindows:
    """A plan as windows through the ring."""

    streams = 1

    def __init__(self, plan: CopyPlan, stream: torch.cuda.Stream, options: EngineOptions) -> None:
        self._backup = to_host(plan)
        self._ring = ring_of(stream.device, self._backup)
        self._windows = windows_of(near_side(plan), far_side(plan))
        self.by_layer = all(len(window.planes) == 1 for window in self._windows)
        self._plan = plan
        self._options = options
        host_pages = plan.numbers[1 if self._backup else 0]
        self._host_pages = np.asarray(host_pages).astype(np.int64, copy=False)
        self._kernels: dict[int, PreparedKernel] = {}
        self._numbers: dict[int, Numbers] = {}

    def seconds(self, planes: Sequence[int]) -> float:
        """Return what DMA ranges, launches and events take."""
        wanted, count = set(planes), self._plan.count
        mine = [window for window in self._windows if not wanted.isdisjoint(window.planes)]
        steps = sum(-(-count // self._ring.pages_a_step(window.nbytes, count)) for window in mine)
        return _STEP_S * steps + RANGE_S * count * len(mine)

    def submit(self, planes: Sequence[int], stream: torch.cuda.Stream) -> None:
        """Enqueue the windows that hold `planes`: all planes at once where windows hold several."""
        wanted = set(planes)
        with torch.cuda.device(stream.device), self._ring.lock:
            mine = [n for n, window in enumerate(self._windows) if not wanted.isdisjoint(window.planes)]
            if not can_be_inline(self._plan):  # an upload of page numbers must not queue behind the pages
                for number in mine:
                    self._kernel(number, stream)
            self._ring.kernels.wait_stream(stream)
            for number in mine:
                self._ring.use_pages_of(self._windows[number].nbytes, stream)
                self._submit_window(number, stream)
            stream.wait_stream(self._ring.kernels)

    def _kernel(self, number: int, stream: torch.cuda.Stream) -> PreparedKernel:
        """Return what moves pages between a window's place in the ring and the device's planes.

        It is made when it is first launched, which in a load is after the first copy has begun.
        """
        found = self._kernels.get(number)
        if found is None:
            plan, nbytes = self._plan, self._windows[number].nbytes
            near, far = _ring_maps(plan.source, plan.destination)[number]
            far_pages = plan.source_pages if self._backup else plan.destination_pages
            here = self._ring.pages_in_turn(nbytes, plan.count)
            sides = (far, near, far_pages, here) if self._backup else (near, far, here, far_pages)
            inner = CopyPlan(*sides, check_indices=False)
            found = PreparedKernel(inner, near, stream, GRID, self._options, self._numbers.get(nbytes))
            self._kernels[number] = found
            self._numbers.setdefault(nbytes, found.numbers)
        return found

    def fault(self) -> Exception | None:
        """Return None: page numbers were checked on the host."""
        return None

    def _submit_window(self, which: int, stream: torch.cuda.Stream) -> None:
        ring, window, count = self._ring, self._windows[which], len(self._host_pages)
        step = ring.pages_a_step(window.nbytes, count)
        hosts = (window.base + self._host_pages * window.nbytes).astype(np.uint64)
        within = (np.arange(min(step, count)) * window.nbytes).astype(np.uint64)
        host_row = 0 if self._backup else 1
        planes = range(len(window.planes))
        for number, start in enumerate(range(0, count, step)):
            slot = number % ring.slots
            pages = min(step, count - start)
            there = np.uint64(ring.address + slot * ring.pages_a_slot(window.nbytes) * window.nbytes)
            ranges = np.empty((3, pages), dtype=np.uint64)
            ranges[host_row] = hosts[start : start + pages]
            ranges[1 - host_row] = within[:pages] + there
            ranges[2] = window.nbytes
            if self._backup:
                ring.kernels.wait_event(ring.free[slot])
                self._kernel(which, stream).submit_pages(planes, start, pages, ring.kernels)
                ring.full[slot].record(ring.kernels)
                stream.wait_event(ring.full[slot])
                submit_ranges(ranges, stream, backup=True)
                ring.free[slot].record(stream)
            else:
                stream.wait_event(ring.free[slot])
                submit_ranges(ranges, stream, backup=False)
                ring.full[slot].record(stream)
                ring.kernels.wait_event(ring.full[slot])
                self._kernel(which, stream).submit_pages(planes, start, pages, ring.kernels)
                ring.free[slot].record(ring.kernels)


class Ring:
    """Memory on a device in `SLOTS` slots, and the stream of the kernels that empty or fill them.

    A slot is `full` for the side that takes bytes out and `free` for the side that puts them in.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.slots, self.slot_nbytes = SLOTS, SLOT_NBYTES
        self.bytes = torch.empty(self.slots * self.slot_nbytes, dtype=torch.uint8, device=device)
        self.address = self.bytes.data_ptr()
        self.kernels = new_stream(device, priority=-1)
        self.full = [new_event() for _ in range(self.slots)]
        self.free = [new_event() for _ in range(self.slots)]
        self._page_nbytes = 0

    def pages_a_slot(self, page_nbytes: int) -> int:
        """Return how many pages a slot holds."""
        return self.slot_nbytes // page_nbytes

    def pages_a_step(self, page_nbytes: int, count: int) -> int:
        """Return how many pages go together: a slot's, or fewer where there are few: steps overlap."""
        least = -(-LEAST_NBYTES // page_nbytes)
        return max(1, min(self.pages_a_slot(page_nbytes), max(least, -(-count // LEAST_STEPS))))

    def pages_in_turn(self, page_nbytes: int, count: int) -> torch.Tensor:
        """Return which page of the ring each of `count` pages goes through, int64 `[count]`."""
        position = np.arange(count)
        step = self.pages_a_step(page_nbytes, count)
        return torch.from_numpy(
            position // step % self.slots * self.pages_a_slot(page_nbytes) + position % step
        )

    def use_pages_of(self, nbytes: int, stream: torch.cuda.Stream) -> None:
        """Wait until all slots are free where they were cut for pages of another size."""
        if nbytes != self._page_nbytes:
            for event in self.free:
                stream.wait_event(event)
                self.kernels.wait_event(event)
            self._page_nbytes = nbytes


@cache
def ring_of(device: torch.device, backup: bool) -> Ring:  # noqa: ARG001 - one for each direction
    """Return the ring of a device for one direction; allocated once."""
    return Ring(device)


def _map_ring(source: RowMap, destination: RowMap) -> tuple[tuple[RowMap, RowMap], ...]:
    """Return, for each window, the ring seen as pages like the host's, and the device's planes."""
    backup = destination.device.type == "cpu"
    near, far = (destination, source) if backup else (source, destination)
    ring = ring_of(far.device, backup)
    maps = []
    for window in windows_of(near, far):
        pages = ring.pages_a_slot(window.nbytes) * ring.slots
        planes = [
            _in_ring(ring, near.planes[number], near.planes[number].data_ptr() - window.base, window, pages)
            for number in window.planes
        ]
        maps.append((RowMap(tuple(planes)), far.select(window.planes)))
    return tuple(maps)


def _in_ring(ring: Ring, plane: torch.Tensor, offset: int, window: Window, pages: int) -> torch.Tensor:
    """Return a plane of host pages as it lies in the ring."""
    _, rows, pieces, piece_nbytes = plane.shape
    _, row_stride, piece_stride, _ = plane.stride()
    strides = (window.nbytes, row_stride, piece_stride)
    return byte_plane(ring.bytes, offset, (pages, rows, pieces, piece_nbytes), strides)


_ring_maps = PairMemo(_map_ring)
