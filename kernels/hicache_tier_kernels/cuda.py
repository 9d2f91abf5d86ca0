"""The engine `cuda`: one kernel of few blocks that reads or writes host memory over the link.

Reads of host memory by a multiprocessor go in requests of 128 bytes, whatever instruction makes them (16
byte loads, `L2::256B` hints and bulk copies into shared memory all measured 0.93 of a contiguous copy on an
H200), writes likewise (0.955).
"""

from __future__ import annotations

import threading
from ctypes import c_uint, c_void_p
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, ClassVar

import torch

from hicache_tier.errors import EngineUnavailableError

from .driver import DriverError, driver, pointers
from .engine import (
    DEFAULTS,
    EngineOptions,
    check_stream,
    cuda_device,
    driver_support,
    near_side,
    reachable,
    to_host,
)
from .indices import INLINE_PAGES, IndexCheck, PageNumbers, can_be_inline, numbers_for
from .memo import PairMemo
from .nvrtc import CompileError, compile_cubin, compiler
from .shapes import plane_groups, plane_table
from .support import Support

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .indices import Numbers
    from .plan import CopyPlan, RowMap
    from .shapes import Shape

    Places = tuple[int, int, int]
    Span = tuple[int, int, int, int]

_INLINE_TYPES = (torch.int32, torch.int32)
_C_NAMES = {torch.int32: "int", torch.int64: "long long"}


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks of a launch, threads of a block, and loads that each thread has under way."""

    blocks: int
    threads: int
    unroll: int


READ = Grid(8, 1024, 4)
"""For reads of host memory: the link's latency wants half a megabyte under way."""
WRITE = Grid(4, 512, 2)
"""For writes: stores that queue up before the link hold up all others of the device, so few.

Twice as many bytes under way reach 0.93 of a contiguous copy instead of 0.92 on an idle H200 (0.85 instead
of 0.79 for rows of 656 bytes), and slow products that run beside them by 28 % instead of 4 %; eight times
as many by 70 %."""


_LAUNCH_S = 10e-6
"""What preparing and launching a kernel costs the thread that does it."""


class CudaEngine:
    """Copies by a kernel compiled for the plan's shape."""

    name: ClassVar[str] = "cuda"
    cheap: ClassVar[bool] = True

    def available(self, device: torch.device) -> Support:
        """Return whether the kernel can be compiled and loaded for `device`."""
        if device.type != "cuda":
            return Support(ok=False, reason=f"{device} is not a CUDA device")
        return _loadable(device.index or 0)

    def supports(self, plan: CopyPlan) -> Support:
        """Return whether the host side is pinned and the kernel loads."""
        found = reachable(plan)
        device = cuda_device(plan)
        return found if not found or device is None else self.available(device)

    def prepare(
        self, plan: CopyPlan, stream: torch.cuda.Stream, options: EngineOptions = DEFAULTS
    ) -> PreparedKernel:
        """Compile or find the kernels, and upload plane table and page numbers on `stream`."""
        found = self.supports(plan)
        if not found:
            raise EngineUnavailableError(f"{self.name}: {found.reason}.")
        check_stream(plan, stream)
        grid = WRITE if to_host(plan) else READ
        if options.max_sms is not None:
            grid = replace(grid, blocks=options.max_sms)
        return PreparedKernel(plan, near_side(plan), stream, grid, options)


class PreparedKernel:
    """A plan as launches of `copy_pages`; `near` is the side whose lines the lanes follow.

    `numbers` are the same page numbers where they are on the device already.
    """

    by_layer = True
    streams = 2

    def __init__(  # noqa: PLR0917 - internal
        self,
        plan: CopyPlan,
        near: RowMap,
        stream: torch.cuda.Stream,
        grid: Grid,
        options: EngineOptions,
        numbers: Numbers | None = None,
    ) -> None:
        self._plan = plan
        self._kernels = _kernels_of(plan, near, grid, stream.device.index)
        self._table = plane_tables(plan.source, plan.destination)
        self.numbers = found = numbers or numbers_for(plan, stream)
        self._check = None
        checked = plan.check_indices and options.check_indices and plan.indices_on_device
        if checked and isinstance(found, PageNumbers):
            self._check = IndexCheck(plan, found, stream, check_function)
        refused = 0 if self._check is None else self._check.verdict
        self._where: Places = self._table.data_ptr(), refused, found.address

    def seconds(self, planes: Sequence[int]) -> float:  # noqa: ARG002 - a launch, however many they are
        """Return what a launch takes."""
        return _LAUNCH_S * len(self._kernels)

    def submit(self, planes: Sequence[int], stream: torch.cuda.Stream) -> None:
        """Launch one kernel for each group of planes of one shape."""
        self.submit_pages(planes, 0, self._plan.count, stream)

    def submit_pages(self, planes: Sequence[int], start: int, count: int, stream: torch.cuda.Stream) -> None:
        """Copy `count` of the pages from position `start` on."""
        if not count:
            return
        pages, handle = (start, count), stream.cuda_stream
        alone = len(self._kernels) == 1
        for members, kernel in self._kernels:
            mine = tuple(planes) if alone else tuple(plane for plane in planes if plane in members)
            for span in spans(mine):
                kernel.launch(self._where, span, pages, handle)

    def fault(self) -> Exception | None:
        """Return which page number the device refused."""
        return None if self._check is None else self._check.fault()


@lru_cache(maxsize=4096)
def spans(planes: tuple[int, ...]) -> list[Span]:
    """Return (first, span, stride, count) that together name ascending `planes`, one where they are regular.

    Plane `n` of a span list is `first + n // span * stride + n % span`: the layers of a step, component by
    component.
    """
    if not planes:
        return []
    span = next((n for n in range(1, len(planes)) if planes[n] != planes[0] + n), len(planes))
    stride = planes[span] - planes[0] if span < len(planes) else span
    named = [planes[0] + n // span * stride + n % span for n in range(len(planes))]
    if len(planes) % span == 0 and named == list(planes):
        return [(planes[0], span, stride, len(planes))]
    return [(plane, 1, 1, 1) for plane in planes]


@cache
def _loadable(index: int) -> Support:
    """Compile and load the smallest kernel there is, once a device."""
    for found in (driver_support(), compiler()):
        if not found:
            return found
    try:
        with torch.cuda.device(index):
            torch.empty(1, device=f"cuda:{index}")  # makes the context that the module is loaded into
            check_function(index, torch.int64, torch.int64)
    except (CompileError, DriverError) as error:
        return Support(ok=False, reason=str(error))
    return Support(ok=True, reason=f"{compiler().reason}, {_arch(index)}")


def _arch(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def _table_on_device(source: RowMap, destination: RowMap) -> torch.Tensor:
    device = source.device if source.device.type == "cuda" else destination.device
    return torch.from_numpy(plane_table(source, destination)).to(device)


plane_tables = PairMemo(_table_on_device)
"""Plane tables on the device, remembered."""


def copy_macros(
    shape: Shape,
    grid: Grid,
    source_index: torch.dtype,
    destination_index: torch.dtype,
    inline_pages: int = 0,
    *,
    near_source: bool,
) -> dict[str, object]:
    """Return the macros that `copy_pages.cu` is compiled with."""
    return {
        "WORD": shape.word,
        "PIECE": shape.piece,
        "PIECES": shape.pieces,
        "ROWS": shape.rows,
        "RUN": shape.run,
        "RUNS": shape.runs,
        "LINES": shape.lines,
        "NEAR_SOURCE": int(near_source),
        "NEAR_SHIFTED": int(shape.shifted),
        "FAR_JOINED": int(shape.joined),
        "SOURCE_INDEX": _C_NAMES[source_index],
        "DESTINATION_INDEX": _C_NAMES[destination_index],
        "INLINE_PAGES": inline_pages,
        "THREADS": grid.threads,
        "UNROLL": grid.unroll,
    }


class CopyKernel:
    """A loaded kernel with the arguments of its last launch, which are changed for the next.

    Parameters
    ----------
    function : int
    grid : Grid
    """

    def __init__(self, function: int, grid: Grid) -> None:
        self._function = function
        self._blocks, self._threads = grid.blocks, grid.threads
        self._turn = threading.Lock()
        self._places = c_void_p(), c_void_p()
        self._counts = tuple(c_uint() for _ in range(6))
        self._arguments = pointers((*self._places, *self._counts), 0)

    def launch(self, where: Places, span: Span, pages: tuple[int, int], stream: int) -> None:
        """Launch it; a launch copies its arguments.

        Parameters
        ----------
        where : tuple[int, int, int]
            Addresses of the plane table, of the verdict on page numbers or 0, both on the device, and of
            `struct Numbers` on the host.
        span : tuple[int, int, int, int]
            Planes, as of `spans`.
        pages : tuple[int, int]
            The first of them by position, and how many.
        stream : int
        """
        with self._turn:
            self._places[0].value, self._places[1].value, self._arguments[8] = where
            for field, value in zip(self._counts, span + pages, strict=True):
                field.value = value
            driver().launch(self._function, self._blocks, self._threads, stream, self._arguments)


_known_kernels: PairMemo[dict[object, list[tuple[frozenset[int], CopyKernel]]]] = PairMemo(lambda *_: {})


def _kernels_of(
    plan: CopyPlan, near: RowMap, grid: Grid, device: int
) -> list[tuple[frozenset[int], CopyKernel]]:
    """Return the kernels that copy a plan, each with the planes it can copy."""
    near_source = plan.source is near
    inline = INLINE_PAGES if can_be_inline(plan) else 0
    types = _INLINE_TYPES if inline else (plan.source_pages.dtype, plan.destination_pages.dtype)
    known = _known_kernels(plan.source, plan.destination)
    key = near_source, grid, types, inline, device
    found = known.get(key)
    if found is None:
        groups = plane_groups(near, plan.destination if near_source else plan.source)
        found = known[key] = [
            (group.planes, copy_kernel(device, group.shape, near_source, grid, *types, inline))
            for group in groups
        ]
    return found


@cache
def copy_kernel(  # noqa: PLR0917 - what a kernel is compiled for
    device: int,
    shape: Shape,
    near_source: bool,
    grid: Grid,
    source_index: torch.dtype,
    destination_index: torch.dtype,
    inline_pages: int,
) -> CopyKernel:
    """Compile and load a copy kernel into the current context; modules stay loaded."""
    macros = copy_macros(shape, grid, source_index, destination_index, inline_pages, near_source=near_source)
    code = compile_cubin("copy_pages.cu", macros, _arch(device))
    return CopyKernel(driver().function(driver().load_module(code), "copy_pages"), grid)


@cache
def check_function(device: int, source_index: torch.dtype, destination_index: torch.dtype) -> int:
    """Compile and load the check of page numbers into the current context."""
    macros = {"SOURCE_INDEX": _C_NAMES[source_index], "DESTINATION_INDEX": _C_NAMES[destination_index]}
    code = compile_cubin("check_pages.cu", macros, _arch(device))
    return driver().function(driver().load_module(code), "check_pages")
