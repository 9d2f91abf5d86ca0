"""Page numbers on the device: how they get there, and how they are checked where they are."""

from __future__ import annotations

from array import array
from ctypes import addressof, c_int64, c_uint, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache_tier.errors import InvalidArgumentError

from .driver import driver, pointers

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .plan import CopyPlan, PageArray

INLINE_PAGES = 256
"""So many page numbers travel as an argument of the kernel (4 KiB at most), which costs no copy before it."""
_NO_NUMBERS = bytes(2 * INLINE_PAGES * 4)
_LEAST_NBYTES = 4096
_SLOTS_NBYTES = 256 << 10
_ALIGNMENT = 16
_CHECK_BLOCKS, _CHECK_THREADS = 8, 256
_FAULTS = (
    "{names[0]} must be within 0 .. {source}",
    "{names[1]} must be within 0 .. {destination}",
    "{names[1]} must not repeat",
)


@dataclass(frozen=True, slots=True)
class Slot:
    """Pinned host memory and as much device memory, for page numbers on their way.

    Attributes
    ----------
    bytes : numpy.ndarray
        The host's.
    host, there : int
        Addresses on the host and on the device.
    """

    bytes: NDArray[np.uint8]
    host: int
    there: int


def _make_slots(device: torch.device, nbytes: int) -> list[Slot]:
    """Allocate several slots at once: pinning takes longer than most transfers; they are never given back."""
    count = max(1, _SLOTS_NBYTES // nbytes)
    pinned = torch.empty(count * nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(count * nbytes, dtype=torch.uint8, device=device)
    _memory.append((pinned, there))
    return [
        Slot(pinned.numpy()[at : at + nbytes], pinned.data_ptr() + at, there.data_ptr() + at)
        for at in range(0, count * nbytes, nbytes)
    ]


_free: dict[tuple[int | None, int], list[Slot]] = {}
_memory: list[tuple[torch.Tensor, torch.Tensor]] = []


class NumbersInline:
    """Few page numbers, which travel as an argument of the kernel.

    Attributes
    ----------
    argument : array
        What `struct Numbers` of the kernel holds: int32 `[2 * INLINE_PAGES]`, sources first.
    """

    def __init__(self, source: PageArray, destination: PageArray) -> None:
        self.argument = array("i", _NO_NUMBERS)
        self.argument[: len(source)] = array("i", source.tolist())
        self.argument[INLINE_PAGES : INLINE_PAGES + len(destination)] = array("i", destination.tolist())
        self.address = self.argument.buffer_info()[0]


class PageNumbers:
    """Both lists of page numbers where a kernel can read them.

    Those on the host are uploaded in one copy, by way of a slot that is taken again for others once this
    object is gone; those on the device are read where they are.

    Attributes
    ----------
    argument : ctypes array
        What `struct Numbers` of the kernel holds: addresses of both lists.
    address : int
        Of `argument`.
    """

    def __init__(self, plan: CopyPlan, stream: torch.cuda.Stream) -> None:
        pages = plan.source_pages, plan.destination_pages
        sizes = [
            0 if numbers is None else -(-numbers.nbytes // _ALIGNMENT) * _ALIGNMENT
            for numbers in plan.numbers
        ]
        self._kept: list[torch.Tensor] = []
        self._home: list[Slot] | None = None
        total = sum(sizes)
        if total:
            size = max(_LEAST_NBYTES, 1 << (total - 1).bit_length())
            self._home = _free.setdefault((stream.device.index, size), [])
            try:
                self._slot = self._home.pop()
            except IndexError:
                self._slot, *others = _make_slots(stream.device, size)
                self._home.extend(others)
        places, at = [], 0
        for index, numbers, nbytes in zip(pages, plan.numbers, sizes, strict=True):
            if numbers is None:
                with torch.cuda.stream(stream):
                    self._kept.append(index.contiguous())
                places.append(self._kept[-1].data_ptr())
            else:
                self._slot.bytes[at : at + numbers.nbytes] = np.ascontiguousarray(numbers).view(np.uint8)
                places.append(self._slot.there + at)
            at += nbytes
        if total:
            driver().copy(self._slot.there, self._slot.host, total, stream.cuda_stream)
        self.argument = (c_void_p * 2)(*places)
        self.address = addressof(self.argument)

    def __del__(self) -> None:
        if self._home is not None:
            self._home.append(self._slot)


Numbers = NumbersInline | PageNumbers


def can_be_inline(plan: CopyPlan) -> bool:
    """Return whether page numbers can travel as an argument."""
    limit = max(plan.source.num_pages, plan.destination.num_pages)
    return plan.count <= INLINE_PAGES and not plan.indices_on_device and limit < 1 << 31


def numbers_for(plan: CopyPlan, stream: torch.cuda.Stream) -> Numbers:
    """Return the page numbers of a plan as a kernel takes them; uploads on `stream` where they are many."""
    ours, theirs = plan.numbers
    if ours is not None and theirs is not None and can_be_inline(plan):
        return NumbersInline(ours, theirs)
    return PageNumbers(plan, stream)


class IndexCheck:
    """A check of page numbers that runs before the copies and stops them.

    Attributes
    ----------
    verdict : int
        Address of a word on the device that is not 0 where a number was refused.
    """

    def __init__(
        self,
        plan: CopyPlan,
        numbers: PageNumbers,
        stream: torch.cuda.Stream,
        function: Callable[[int, torch.dtype, torch.dtype], int],
    ) -> None:
        self._plan = plan
        words = -(-plan.destination.num_pages // 32)
        with torch.cuda.stream(stream):
            self._scratch = torch.zeros(words + 2, dtype=torch.int32, device=stream.device)
            self.verdict = self._scratch.data_ptr()
            ours, theirs = numbers.argument
            values = (
                c_void_p(ours),
                c_void_p(theirs),
                c_uint(plan.count),
                c_int64(plan.source.num_pages),
                c_int64(plan.destination.num_pages),
                c_void_p(self._scratch[2:].data_ptr()),
                c_void_p(self.verdict),
            )
            types = plan.source_pages.dtype, plan.destination_pages.dtype
            kernel = function(stream.device.index, *types)
            driver().launch(kernel, _CHECK_BLOCKS, _CHECK_THREADS, stream.cuda_stream, pointers(values))
            self._report = torch.empty(2, dtype=torch.int32, pin_memory=True)
            self._report.copy_(self._scratch[:2], non_blocking=True)

    def fault(self) -> InvalidArgumentError | None:
        """Return which page number was refused; call it once the check has run."""
        verdict, position = self._report.tolist()
        if not verdict:
            return None
        plan = self._plan
        limits = {"source": plan.source.num_pages - 1, "destination": plan.destination.num_pages - 1}
        index = plan.source_pages if verdict == 1 else plan.destination_pages
        text = _FAULTS[verdict - 1].format(names=plan.names, **limits)
        return InvalidArgumentError(f"{text}, got {int(index[position])} at {position}; nothing was copied.")
