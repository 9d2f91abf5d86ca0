"""The engine `cuda`: one kernel of few blocks that reads or writes host memory over the link.

Reads of host memory by a multiprocessor go in requests of 128 bytes, whatever instruction makes them (16
byte loads, `L2::256B` hints and bulk copies into shared memory all measured 0.93 of a contiguous copy on an
H200), writes likewise (0.955). Four multiprocessors are enough for both where each of their lanes has eight
loads under way.
"""

from __future__ import annotations

from ctypes import c_int64, c_uint, c_void_p
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from hicache_tier.errors import EngineUnavailableError, InvalidArgumentError

from .driver import DriverError, driver, pointers
from .engine import DEFAULTS, EngineOptions, check_stream, cuda_device, driver_support, near_side, reachable
from .nvrtc import CompileError, compile_cubin, compiler
from .plan import PairMemo
from .shapes import plane_groups, plane_table
from .support import Support

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .plan import CopyPlan, RowMap
    from .shapes import Shape

MAX_SMS = 4
"""Default of `EngineOptions.max_sms`: the fewest that keep the link as busy as any number on an H200."""
THREADS = 1024
UNROLL = 8
_CHECK_BLOCKS, _CHECK_THREADS = 8, 256
_C_NAMES = {torch.int32: "int", torch.int64: "long long"}
_FAULTS = (
    "source_pages must be within 0 .. {source}",
    "destination_pages must be within 0 .. {destination}",
    "destination_pages must not repeat",
)


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
        return PreparedKernel(plan, near_side(plan), stream, options.max_sms or MAX_SMS, options)


class PreparedKernel:
    """A plan as launches of `copy_pages`; `near` is the side whose lines the lanes follow."""

    by_layer = True
    streams = 2

    def __init__(
        self,
        plan: CopyPlan,
        near: RowMap,
        stream: torch.cuda.Stream,
        blocks: int,
        options: EngineOptions,
    ) -> None:
        near_source = plan.source is near
        self._plan = plan
        self._blocks = blocks
        self._device = stream.device
        types = plan.source_pages.dtype, plan.destination_pages.dtype
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            self._groups = [
                (group, _copy_function(self._device.index, group.shape, near_source, *types))
                for group in plane_groups(near, plan.destination if near_source else plan.source)
            ]
            self._table = _tables(plan.source, plan.destination)
            uploaded = upload([plan.source_pages, plan.destination_pages], self._device)
            self._source_pages, self._destination_pages = uploaded
            self._refused: torch.Tensor | None = None
            self._report: torch.Tensor | None = None
            if plan.check_indices and options.check_indices and plan.indices_on_device:
                self._check(stream)
        refused = 0 if self._refused is None else self._refused.data_ptr()
        self._planes = c_uint(0), c_uint(1), c_uint(1), c_uint(0)
        self._indices, self._num_pages = (c_void_p(0), c_void_p(0)), c_uint(0)
        self._values = (
            c_void_p(self._table.data_ptr()),
            *self._planes,
            *self._indices,
            self._num_pages,
            c_void_p(refused),
        )
        self._arguments = pointers(self._values)

    def submit(self, planes: Sequence[int], stream: torch.cuda.Stream) -> None:
        """Launch one kernel for each group of planes of one shape."""
        self.submit_pages(planes, 0, len(self._plan.source_pages), stream)

    def submit_pages(self, planes: Sequence[int], start: int, count: int, stream: torch.cuda.Stream) -> None:
        """Copy `count` of the pages from position `start` on."""
        if not count:
            return
        indices = (self._source_pages, self._destination_pages)
        for value, index in zip(self._indices, indices, strict=True):
            value.value = index.data_ptr() + start * index.element_size()
        self._num_pages.value = count
        launch, handle = driver().launch, stream.cuda_stream
        alone = len(self._groups) == 1
        for group, function in self._groups:
            for found in spans(planes if alone else [plane for plane in planes if plane in group.planes]):
                for field, number in zip(self._planes, found, strict=True):
                    field.value = number
                launch(function, self._blocks, THREADS, handle, self._arguments)

    def fault(self) -> Exception | None:
        """Return which page number the device refused."""
        if self._report is None or not int(self._report[0]):
            return None
        kind, position = int(self._report[0]) - 1, int(self._report[1])
        limits = {
            "source": self._plan.source.num_pages - 1,
            "destination": self._plan.destination.num_pages - 1,
        }
        index = self._plan.destination_pages if kind else self._plan.source_pages
        text = _FAULTS[kind].format(**limits)
        return InvalidArgumentError(f"{text}, got {int(index[position])} at {position}; nothing was copied.")

    def _check(self, stream: torch.cuda.Stream) -> None:
        plan = self._plan
        words = -(-plan.destination.num_pages // 32)
        scratch = torch.zeros(words + 2, dtype=torch.int32, device=self._device)
        self._refused = scratch[:2]
        values = [
            c_void_p(self._source_pages.data_ptr()),
            c_void_p(self._destination_pages.data_ptr()),
            c_uint(len(plan.source_pages)),
            c_int64(plan.source.num_pages),
            c_int64(plan.destination.num_pages),
            c_void_p(scratch[2:].data_ptr()),
            c_void_p(scratch.data_ptr()),
        ]
        types = plan.source_pages.dtype, plan.destination_pages.dtype
        function = _check_function(self._device.index, *types)
        driver().launch(function, _CHECK_BLOCKS, _CHECK_THREADS, stream.cuda_stream, pointers(values))
        self._report = torch.empty(2, dtype=torch.int32, pin_memory=True)
        self._report.copy_(scratch[:2], non_blocking=True)


def spans(planes: Sequence[int]) -> list[tuple[int, int, int, int]]:
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


def upload(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Bring small host tensors to the device in one copy on the current stream; device tensors stay.

    The pinned memory in between comes from torch's cache, which keeps it until the copy is done.
    """
    mine = [part.contiguous().view(torch.uint8) for part in parts if part.device.type == "cpu"]
    starts = np.cumsum([0, *(-(-part.numel() // 16) * 16 for part in mine)]).tolist()
    staging = torch.empty(max(16, starts[-1]), dtype=torch.uint8, pin_memory=True)
    for part, start in zip(mine, starts, strict=False):
        staging[start : start + part.numel()] = part
    arrived = staging.to(device, non_blocking=True)
    uploaded = iter([arrived[at : at + part.numel()] for at, part in zip(starts, mine, strict=False)])
    return [
        next(uploaded).view(part.dtype) if part.device.type == "cpu" else part.contiguous() for part in parts
    ]


@cache
def _loadable(index: int) -> Support:
    """Compile and load the smallest kernel there is, once a device."""
    for found in (driver_support(), compiler()):
        if not found:
            return found
    try:
        with torch.cuda.device(index):
            _check_function(index, torch.int64, torch.int64)
    except (CompileError, DriverError) as error:
        return Support(ok=False, reason=str(error))
    return Support(ok=True, reason=f"{compiler().reason}, {_arch(index)}")


def _arch(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def _table_on_device(source: RowMap, destination: RowMap) -> torch.Tensor:
    device = source.device if source.device.type == "cuda" else destination.device
    return torch.from_numpy(plane_table(source, destination)).to(device)


_tables = PairMemo(_table_on_device)


def copy_macros(
    shape: Shape, source_index: torch.dtype, destination_index: torch.dtype, *, near_source: bool
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
        "THREADS": THREADS,
        "UNROLL": UNROLL,
    }


@cache
def _copy_function(
    device: int,
    shape: Shape,
    near_source: bool,
    source_index: torch.dtype,
    destination_index: torch.dtype,
) -> int:
    """Compile and load a copy kernel into the current context; modules stay loaded."""
    macros = copy_macros(shape, source_index, destination_index, near_source=near_source)
    code = compile_cubin("copy_pages.cu", macros, _arch(device))
    return driver().function(driver().load_module(code), "copy_pages")


@cache
def _check_function(device: int, source_index: torch.dtype, destination_index: torch.dtype) -> int:
    macros = {"SOURCE_INDEX": _C_NAMES[source_index], "DESTINATION_INDEX": _C_NAMES[destination_index]}
    code = compile_cubin("check_pages.cu", macros, _arch(device))
    return driver().function(driver().load_module(code), "check_pages")
