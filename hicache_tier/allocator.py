"""Which pages of a pool are free, and who had them."""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache_tier_kernels import INDEX_DTYPES

from .errors import DoubleFreeError, InvalidArgumentError
from .geometry import positive

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNNAMED = "an unnamed owner"


def page_tensor(name: str, pages: object) -> torch.Tensor:
    """Return page numbers as a tensor `[n]` of int32 or int64; a tensor is taken as it is.

    Parameters
    ----------
    name : str
        What to call the argument in an error.
    pages : torch.Tensor, numpy.ndarray, list, tuple or range
        Whole numbers; no bool, no float.

    Raises
    ------
    InvalidArgumentError
        For any other type, dtype or number of dimensions.
    """
    if isinstance(pages, np.ndarray) and pages.dtype in {np.dtype(np.int32), np.dtype(np.int64)}:
        pages = torch.tensor(pages)
    if isinstance(pages, torch.Tensor):
        if pages.dtype not in INDEX_DTYPES or pages.dim() != 1:
            raise InvalidArgumentError(
                f"{name} must be int32 or int64 of shape [n], got {pages.dtype} of shape "
                f"{tuple(pages.shape)}."
            )
        if pages.layout is not torch.strided or pages.is_meta:
            kind = "one without memory (meta)" if pages.is_meta else str(pages.layout)
            raise InvalidArgumentError(f"{name} must be a dense tensor (torch.strided), got {kind}.")
        return pages
    if not isinstance(pages, list | tuple | range):
        raise InvalidArgumentError(
            f"{name} must be page numbers: a tensor (int32, int64), list, tuple or range, "
            f"got {type(pages).__name__}."
        )
    numbers: list[int] = []
    for page in pages:
        try:
            number = None if isinstance(page, bool) else operator.index(page)
        except TypeError:
            number = None
        if number is None or not -(1 << 63) <= number < 1 << 63:
            raise InvalidArgumentError(f"{name} must hold whole numbers of 64 bits, got {page!r}.")
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.int64)


def page_array(name: str, pages: object, num_pages: int) -> NDArray[np.int64]:
    """Return page numbers as an int64 array `[n]`, every one within a pool of `num_pages`."""
    array = page_tensor(name, pages).cpu().numpy().astype(np.int64, copy=False)
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= num_pages:
            wrong = low if low < 0 else high
            raise InvalidArgumentError(f"{name} must be within 0 .. {num_pages - 1}, got {wrong}.")
    return array


class PageAllocator:
    """Free and owned pages of a pool of `num_pages`; safe to use from several threads.

    Free pages are kept as runs, binned by the power of two of their length. A request that some run can
    hold gets consecutive pages; otherwise the longest runs are used first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = positive("num_pages", num_pages)
        self._lock = threading.Lock()
        self._owned = np.zeros(num_pages, dtype=bool)
        # Of an owned page who has it, of a free page who freed it last; None where it was never used.
        self._names = np.full(num_pages, None, dtype=object)
        self._bins: list[dict[int, int]] = [{} for _ in range(num_pages.bit_length())]
        self._start_of_end: dict[int, int] = {}
        self._length_of_start: dict[int, int] = {}
        self._add_run(0, num_pages)
        self._free_count = num_pages
        # Calls that may still write to a page, and pages that were freed while there were any.
        self._holds: dict[int, int] = {}
        self._waiting: set[int] = set()

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated."""
        return self._free_count

    @property
    def owned_pages(self) -> int:
        """Pages that are allocated, or held though they were freed; with `free_pages` always all pages."""
        return self.num_pages - self._free_count

    @property
    def held_pages(self) -> int:
        """Pages that were freed and are not given out, because they are held."""
        return len(self._waiting)

    def owner(self, page: int) -> str | None:
        """Return who owns `page`, or None where it is free."""
        (number,) = page_array("page", [page], self.num_pages)
        return str(self._names[number]) if self._owned[number] else None

    def alloc(self, n: int, owner: str | None = None) -> torch.Tensor | None:
        """Take `n` free pages, consecutive ones where a run is long enough.

        Returns
        -------
        torch.Tensor or None
            int64 `[n]` in ascending order; None where fewer than `n` pages are free.
        """
        wanted = positive("n", n)
        with self._lock:
            if wanted > self._free_count:
                return None
            start = self._take_run(wanted)
            pages = np.arange(start, start + wanted) if start is not None else self._gather(wanted)
            self._free_count -= wanted
            self._owned[pages] = True
            self._names[pages] = owner or UNNAMED
        return torch.from_numpy(pages)

    def free(self, pages: object, owner: str | None = None) -> None:
        """Give pages back, all or, on an error, none.

        Raises
        ------
        DoubleFreeError
            Where a page is free already or comes twice; names who freed it first and who frees it now.
        InvalidArgumentError
            Where `pages` are no page numbers of this pool.
        """
        array = np.sort(page_array("pages", pages, self.num_pages))
        if not array.size:
            return
        now = owner or UNNAMED
        repeated = array[1:][array[1:] == array[:-1]]
        if repeated.size:
            raise DoubleFreeError(f"page {repeated[0]} comes twice in one call to free, by {now}.")
        with self._lock:
            wrong = array[~self._owned[array]]
            if wrong.size:
                first = self._names[wrong[0]]
                history = "was never allocated" if first is None else f"was freed already by {first}"
                raise DoubleFreeError(f"page {wrong[0]} {history} and is freed now by {now}.")
            self._owned[array] = False
            self._names[array] = now
            if self._holds:
                held = np.isin(array, list(self._holds))
                self._waiting.update(array[held].tolist())
                array = array[~held]
            self._add_runs(array)

    def hold(self, pages: object) -> None:
        """Give these pages to nobody else, even after they are freed, until as many calls of `let_go`.

        For pages that something abandoned may still write to, whoever owns them.
        """
        numbers = page_array("pages", pages, self.num_pages).tolist()
        with self._lock:
            for number in numbers:
                self._holds[number] = self._holds.get(number, 0) + 1

    def let_go(self, pages: object) -> None:
        """Undo one `hold` of each page; those that were freed meanwhile can be allocated again."""
        numbers = page_array("pages", pages, self.num_pages).tolist()
        with self._lock:
            for number in numbers:
                self._holds[number] -= 1
                if not self._holds[number]:
                    del self._holds[number]
            ready = sorted(number for number in set(numbers) & self._waiting if number not in self._holds)
            self._waiting.difference_update(ready)
            self._add_runs(np.array(ready, np.int64))

    def runs(self) -> list[tuple[int, int]]:
        """Return the free runs as (first page, length), ascending."""
        with self._lock:
            return sorted(self._length_of_start.items())

    def _add_runs(self, array: NDArray[np.int64]) -> None:
        """Insert free pages, ascending, as runs."""
        if not array.size:
            return
        breaks = np.flatnonzero(np.diff(array) != 1) + 1
        firsts = array[np.concatenate(([0], breaks))].tolist()
        lasts = array[np.concatenate((breaks - 1, [array.size - 1]))].tolist()
        self._free_count += int(array.size)
        for first, last in zip(firsts, lasts, strict=True):
            self._add_run(first, last - first + 1)

    def _add_run(self, start: int, length: int) -> None:
        """Insert a free run, joined with its neighbours."""
        before = self._start_of_end.get(start)
        if before is not None:
            length += self._drop_run(before)
            start = before
        if start + length in self._length_of_start:
            length += self._drop_run(start + length)
        self._length_of_start[start] = length
        self._start_of_end[start + length] = start
        self._bins[length.bit_length() - 1][start] = length

    def _drop_run(self, start: int) -> int:
        length = self._length_of_start.pop(start)
        del self._start_of_end[start + length]
        del self._bins[length.bit_length() - 1][start]
        return length

    def _take_run(self, wanted: int) -> int | None:
        """Take consecutive pages from the last run of a bin that fits, short bins first."""
        own = wanted.bit_length() - 1
        for runs in self._bins[own:]:
            # popitem is constant in time; reading an end of a dict that has had deletions there is not.
            if not runs:
                continue
            start, length = runs.popitem()
            runs[start] = length
            if length >= wanted:
                return self._cut(start, wanted)
        fits = (start for start, length in self._bins[own].items() if length >= wanted)
        found = next(fits, None)
        return None if found is None else self._cut(found, wanted)

    def _cut(self, start: int, wanted: int) -> int:
        length = self._drop_run(start)
        if length > wanted:
            self._add_run(start + wanted, length - wanted)
        return start

    def _gather(self, wanted: int) -> NDArray[np.int64]:
        """Take pages from several runs, long bins first."""
        taken: list[NDArray[np.int64]] = []
        for runs in reversed(self._bins):
            while runs and wanted:
                start, length = runs.popitem()
                runs[start] = length
                used = min(length, wanted)
                taken.append(np.arange(self._cut(start, used), start + used))
                wanted -= used
        return np.sort(np.concatenate(taken))
