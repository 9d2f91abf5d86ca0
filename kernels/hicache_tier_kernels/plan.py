"""What an engine copies: two row maps and two lists of page numbers.

A row map knows where every row of every page lies, whatever made it. One address rule covers all layouts:

    address(plane, page, row, piece) = ptrs[plane] + page * page_strides[plane]
                                     + row * row_strides[plane] + piece * piece_strides[plane]

A plane is one component of one layer. `piece` is 0 except where a layout splits a row by head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache_tier.errors import InvalidArgumentError

from .memo import PairMemo

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    PageArray = NDArray[np.int32] | NDArray[np.int64]

INDEX_DTYPES = (torch.int32, torch.int64)
_FEW = 64


def byte_plane(
    base: torch.Tensor, offset: int, shape: tuple[int, int, int, int], strides: tuple[int, int, int]
) -> torch.Tensor:
    """Return the strided byte view `[pages, rows, pieces, piece_nbytes]` of memory that `base` belongs to.

    Parameters
    ----------
    base : torch.Tensor
        Only its memory counts, not its shape or dtype.
    offset : int
        Bytes from the first element of `base` to page 0.
    shape : tuple[int, int, int, int]
        Pages, rows a page, pieces a row, bytes a piece.
    strides : tuple[int, int, int]
        Bytes from one page, row and piece to the next.
    """
    memory = torch.empty(0, dtype=torch.uint8, device=base.device).set_(base.untyped_storage())
    first = base.storage_offset() * base.element_size() + offset
    return memory.as_strided(shape, (*strides, 1), first)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RowMap:
    """Where the rows of a pool lie.

    Attributes
    ----------
    planes : tuple[torch.Tensor, ...]
        One uint8 view `[pages, rows, pieces, piece_nbytes]` for each component and layer, component-major
        (`K0 .. Kn, V0 .. Vn`), without a copy. Planes may differ in strides, pieces and row bytes (V
        narrower than K); pages, rows and device are the same for all.
    registered : tuple[tuple[int, int], ...]
        Address and length of the ranges in which host memory was registered with CUDA, ascending. A copy
        must not cross from one into the next. Empty where the memory is plain, or pinned as a whole.
    num_pages, rows : int
        Pages of every plane, and rows a page has in every plane.
    device : torch.device
        The device of all planes.
    page_nbytes : int
        Bytes of one page over all planes.
    """

    planes: tuple[torch.Tensor, ...]
    registered: tuple[tuple[int, int], ...] = ()
    num_pages: int = field(init=False)
    rows: int = field(init=False)
    device: torch.device = field(init=False)
    page_nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.planes:
            raise InvalidArgumentError("a row map needs at least one plane.")
        first = self.planes[0]
        for number, plane in enumerate(self.planes):
            if plane.dtype != torch.uint8 or plane.dim() != 4 or plane.stride(3) != 1:
                raise InvalidArgumentError(
                    f"plane {number} must be a uint8 view [pages, rows, pieces, piece_nbytes] with inner "
                    f"stride 1, got {plane.dtype} of shape {tuple(plane.shape)} and strides {plane.stride()}."
                )
            if plane.shape[:2] != first.shape[:2] or plane.device != first.device:
                raise InvalidArgumentError(
                    f"plane {number} has {tuple(plane.shape[:2])} pages and rows on {plane.device}, "
                    f"plane 0 has {tuple(first.shape[:2])} on {first.device}; they must be the same."
                )
        object.__setattr__(self, "num_pages", first.shape[0])
        object.__setattr__(self, "rows", first.shape[1])
        object.__setattr__(self, "device", first.device)
        object.__setattr__(self, "page_nbytes", self.rows * sum(self.row_nbytes))

    @property
    def pinned(self) -> bool:
        """Whether a device can reach the memory: host memory that is registered or pinned."""
        return self.device.type == "cpu" and (bool(self.registered) or self.planes[0].is_pinned())

    @property
    def ptrs(self) -> tuple[int, ...]:
        """Address of page 0, row 0, piece 0 of each plane."""
        return tuple(plane.data_ptr() for plane in self.planes)

    @property
    def page_strides(self) -> tuple[int, ...]:
        """Bytes from a page to the next, each plane."""
        return tuple(plane.stride(0) for plane in self.planes)

    @property
    def row_strides(self) -> tuple[int, ...]:
        """Bytes from a row to the next within a page, each plane."""
        return tuple(plane.stride(1) for plane in self.planes)

    @property
    def piece_strides(self) -> tuple[int, ...]:
        """Bytes from a piece of a row to the next, each plane."""
        return tuple(plane.stride(2) for plane in self.planes)

    @property
    def pieces(self) -> tuple[int, ...]:
        """Pieces a row is split into, each plane: 1 unless the layout splits rows by head."""
        return tuple(plane.shape[2] for plane in self.planes)

    @property
    def piece_nbytes(self) -> tuple[int, ...]:
        """Bytes of one piece, each plane."""
        return tuple(plane.shape[3] for plane in self.planes)

    @property
    def row_nbytes(self) -> tuple[int, ...]:
        """Bytes of one row, each plane."""
        return tuple(plane.shape[2] * plane.shape[3] for plane in self.planes)

    def address(self, plane: int, page: int, row: int = 0, piece: int = 0) -> int:
        """Return the address of one piece; Python integers, so no width to overflow."""
        view = self.planes[plane]
        steps = view.stride(0) * page + view.stride(1) * row + view.stride(2) * piece
        return view.data_ptr() + steps

    def select(self, numbers: Iterable[int]) -> RowMap:
        """Return the map of some planes, in the order given."""
        return RowMap(tuple(self.planes[number] for number in numbers), self.registered)


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Copy `source_pages[i]` of `source` to `destination_pages[i]` of `destination`, all planes.

    Attributes
    ----------
    source, destination : RowMap
        The same number of planes, rows a page and bytes a row, plane by plane. A side may split its rows
        into pieces that the other does not.
    source_pages, destination_pages : torch.Tensor
        int32 or int64, `[n]`, on the CPU or the device of either map. Source pages may repeat.
    check_indices : bool
        Whether page numbers are checked. Those on the CPU are checked here; those on a device by the engine
        that runs the plan, before it copies anything.
    names : tuple[str, str]
        What to call both lists of page numbers in an error.
    count : int
        Pages to copy.
    numbers : tuple
        Both lists as arrays where they are on the CPU, else None.
    indices_on_device : bool
        Whether some page numbers are on a device, so that only a kernel can read them without waiting.

    Raises
    ------
    InvalidArgumentError
        Where the maps do not match, an index is out of range, or a destination page repeats. Nothing is
        touched by then.
    """

    source: RowMap
    destination: RowMap
    source_pages: torch.Tensor
    destination_pages: torch.Tensor
    check_indices: bool = True
    names: tuple[str, str] = ("source_pages", "destination_pages")
    count: int = field(init=False)
    numbers: tuple[PageArray | None, PageArray | None] = field(init=False)
    indices_on_device: bool = field(init=False)

    def __post_init__(self) -> None:
        _matched(self.source, self.destination)
        ours, theirs = self.source_pages, self.destination_pages
        _check_index(self.names[0], ours, self)
        _check_index(self.names[1], theirs, self)
        counts = ours.numel(), theirs.numel()
        if counts[0] != counts[1]:
            raise InvalidArgumentError(
                f"{self.names[0]} and {self.names[1]} go one to one, got {counts[0]} and {counts[1]}."
            )
        numbers = _array(ours), _array(theirs)
        object.__setattr__(self, "count", counts[0])
        object.__setattr__(self, "numbers", numbers)
        object.__setattr__(self, "indices_on_device", any(found is None for found in numbers))
        if self.check_indices and counts[0] and not self._plainly_right(*numbers):
            if numbers[0] is not None:
                _check_range(self.names[0], numbers[0], self.source.num_pages)
            if numbers[1] is not None:
                _check_range(self.names[1], numbers[1], self.destination.num_pages)
                _check_distinct(self.names[1], numbers[1], self.destination.num_pages)

    def _plainly_right(self, ours: PageArray | None, theirs: PageArray | None) -> bool:
        """Return whether few page numbers are right: sooner seen of Python's lists than of arrays."""
        if ours is None or theirs is None or len(ours) > _FEW:
            return False
        sources, destinations = ours.tolist(), theirs.tolist()
        return (
            min(sources) >= 0
            and max(sources) < self.source.num_pages
            and min(destinations) >= 0
            and max(destinations) < self.destination.num_pages
            and len(set(destinations)) == len(destinations)
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the plan copies."""
        return self.count * self.source.page_nbytes

    def on_host(self) -> CopyPlan:
        """Return the same plan with its page numbers on the CPU; waits for the device where they are not."""
        if not self.indices_on_device:
            return self
        numbers = self.source_pages.cpu(), self.destination_pages.cpu()
        return CopyPlan(self.source, self.destination, *numbers, self.check_indices, self.names)

    def part(self, pages: slice) -> CopyPlan:
        """Return the plan of some of the pages; they were checked with the others."""
        numbers = self.source_pages[pages], self.destination_pages[pages]
        return CopyPlan(self.source, self.destination, *numbers, check_indices=False)


def _check_maps(source: RowMap, destination: RowMap) -> None:
    counts = len(source.planes), len(destination.planes)
    if counts[0] != counts[1]:
        raise InvalidArgumentError(
            f"source and destination must have as many planes, got {counts[0]} and {counts[1]}."
        )
    if source.rows != destination.rows:
        raise InvalidArgumentError(
            f"source and destination must have as many rows a page, got {source.rows} and {destination.rows}."
        )
    for number, (ours, theirs) in enumerate(zip(source.planes, destination.planes, strict=True)):
        row_nbytes = ours.shape[2] * ours.shape[3], theirs.shape[2] * theirs.shape[3]
        if row_nbytes[0] != row_nbytes[1]:
            raise InvalidArgumentError(
                f"plane {number}: rows must have as many bytes, got {row_nbytes[0]} and {row_nbytes[1]}."
            )
        if ours.shape[2] != theirs.shape[2] and 1 not in {ours.shape[2], theirs.shape[2]}:
            raise InvalidArgumentError(
                f"plane {number}: rows are split into {ours.shape[2]} and {theirs.shape[2]} pieces; "
                f"they must be split alike, or one side not at all."
            )


_matched = PairMemo(_check_maps)


def _array(index: torch.Tensor) -> PageArray | None:
    return index.numpy() if index.device.type == "cpu" else None


def _check_index(name: str, index: torch.Tensor, plan: CopyPlan) -> None:
    if index.dtype not in INDEX_DTYPES or index.dim() != 1:
        raise InvalidArgumentError(
            f"{name} must be int32 or int64 of shape [n], got {index.dtype} of shape {tuple(index.shape)}."
        )
    if index.device.type == "cpu":
        return
    devices = {plan.source.device, plan.destination.device}
    if index.device not in devices:
        allowed = ", ".join(sorted({"cpu", *map(str, devices)}))
        raise InvalidArgumentError(f"{name} is on {index.device}, allowed: {allowed}.")


def _check_range(name: str, numbers: PageArray, num_pages: int) -> None:
    unsigned = np.uint32 if numbers.itemsize == 4 else np.uint64  # where numbers below 0 are large
    if int(numbers.view(unsigned).max()) >= num_pages:
        low, high = int(numbers.min()), int(numbers.max())
        wrong = low if low < 0 else high
        raise InvalidArgumentError(f"{name} must be within 0 .. {num_pages - 1}, got {wrong}.")


def _check_distinct(name: str, numbers: PageArray, num_pages: int) -> None:
    """Refuse a page that comes twice; one byte a page is cheaper than sorting."""
    seen = np.zeros(num_pages, dtype=bool)
    seen[numbers] = True
    if np.count_nonzero(seen) == len(numbers):
        return
    ordered = np.sort(numbers)
    repeated = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
    raise InvalidArgumentError(f"{name} must not repeat, got page {repeated} more than once.")
