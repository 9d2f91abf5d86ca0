"""Page numbers on the device: how they get there, and how they are checked where they are."""

from __future__ import annotations

from ctypes import c_int64, c_uint, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache_tier.errors import InvalidArgumentError

from .driver import driver, pointers

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .plan import CopyPlan

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


class PageNumbers:
    """Both lists of page numbers where a kernel can read them.

    Those on the host are uploaded in one copy, by way of a slot that is taken again for others once this
    object is gone; those on the device are read where they are.

    Attributes
    ----------
    where : tuple
        Addresses of both lists, and bytes of one number in each.
    """

    def __init__(self, source: torch.Tensor, destination: torch.Tensor, stream: torch.cuda.Stream) -> None:
        parts = (source, destination)
        sizes = [
            -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT if part.device.type == "cpu" else 0 for part in parts
        ]
        self._kept: list[torch.Tensor] = list(parts)
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
        for part, nbytes in zip(parts, sizes, strict=True):
            if part.device.type == "cpu":
                numbers = np.ascontiguousarray(part.numpy()).view(np.uint8)
                if nbytes:
                    self._slot.bytes[at : at + numbers.size] = numbers
                    places.append(self._slot.there + at)
                else:
                    places.append(0)
            else:
                if not part.is_contiguous():
                    with torch.cuda.stream(stream):
                        part = part.contiguous()  # noqa: PLW2901 - the same numbers
                    self._kept.append(part)
                places.append(part.data_ptr())
            at += nbytes
        if total:
            driver().copy(self._slot.there, self._slot.host, total, stream.cuda_stream)
        self.where = (tuple(places), (source.element_size(), destination.element_size()))

    def __del__(self) -> None:
        if self._home is not None:
            self._home.append(self._slot)


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
            places, _ = numbers.where
            values = (
                c_void_p(places[0]),
                c_void_p(places[1]),
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
