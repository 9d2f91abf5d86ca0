"""XXH3-64 of pages where they lie in device memory, by two kernels (`checksum.cu`).

The first reads the pages once at the speed of device memory; the second goes through 1/16 as many bytes, a
few threads a page, so what it takes is the length of one page (about 35 ns a KiB), however many there are.
"""

from __future__ import annotations

from ctypes import c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache_tier.errors import InvalidArgumentError

from .driver import DriverError, driver, pointers
from .engine import driver_support
from .nvrtc import CompileError, compile_cubin, compiler
from .support import Support

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

LEAST_NBYTES = 241
"""Shorter inputs are hashed by other formulas; pages are never that short."""
BLOCK_NBYTES = 1024
_ALIGNMENT = 16
_THREADS, _BLOCKS = 256, 1024
_PAGE_THREADS, _THREADS_A_PAGE = 32, 4
_PRIME, _MIX = 0x9E3779B185EBCA87, 0x165667919E3779F9


@dataclass(frozen=True, slots=True)
class PageShape:
    """How the pages of a call lie in memory: fragments a page, and bytes of each.

    Raises
    ------
    InvalidArgumentError
        Where pages are too short, or several fragments are not multiples of 1024 bytes.
    """

    fragments: int
    fragment_nbytes: int

    def __post_init__(self) -> None:
        if self.nbytes < LEAST_NBYTES:
            raise InvalidArgumentError(f"pages must have {LEAST_NBYTES} bytes or more, got {self.nbytes}.")
        if self.fragments > 1 and self.fragment_nbytes % BLOCK_NBYTES:
            raise InvalidArgumentError(
                f"fragments must be multiples of {BLOCK_NBYTES} bytes, got {self.fragment_nbytes}."
            )

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return self.fragments * self.fragment_nbytes

    @property
    def blocks(self) -> int:
        """Blocks that are followed by another, and so are summed apart."""
        return (self.nbytes - 1) // BLOCK_NBYTES

    @property
    def blocks_a_fragment(self) -> int:
        """Blocks of a fragment; of the whole page where it is one."""
        return self.fragment_nbytes // BLOCK_NBYTES if self.fragments > 1 else max(1, self.blocks)


def finish(results: Words, nbytes: int) -> Words:
    """Return checksums of pages of `nbytes` from what the second kernel adds up: the last mixing."""
    mixed = results + np.uint64(nbytes * _PRIME % (1 << 64))
    mixed ^= mixed >> np.uint64(37)
    mixed *= np.uint64(_MIX)
    mixed ^= mixed >> np.uint64(32)
    return mixed


class PageChecksums:
    """Checksums of up to `pages` pages at a time on one device; used by one thread at a time.

    Parameters
    ----------
    device : torch.device
    shape : PageShape
    pages : int

    Raises
    ------
    CompileError, DriverError
        Where `checksum_support` says no.
    """

    def __init__(self, device: torch.device, shape: PageShape, pages: int) -> None:
        self.shape, self.pages = shape, pages
        self._kernels = _functions(device.index or 0)
        words = pages * (shape.fragments + 1)
        self._input = torch.empty(words, dtype=torch.int64, pin_memory=True)
        self._output = torch.empty(pages, dtype=torch.int64, pin_memory=True)
        self._there = torch.empty(words + pages, dtype=torch.int64, device=device)
        self._sums = torch.empty(pages * shape.blocks * 8, dtype=torch.int64, device=device)

    def submit(self, addresses: Words, seeds: Words, stream: torch.cuda.Stream) -> None:
        """Enqueue the checksums of some pages; the results of an earlier call must have been taken.

        Parameters
        ----------
        addresses : uint64 [n, F]
            Of each page's fragments, in order; multiples of 16.
        seeds : uint64 [n]
        stream : torch.cuda.Stream
        """
        count, shape = len(seeds), self.shape
        if not count:
            return
        words = self._input.numpy().view(np.uint64)
        first = count * shape.fragments
        words[:first] = addresses.reshape(-1)
        words[first : first + count] = seeds
        used = first + count
        with torch.cuda.stream(stream):
            self._there[:used].copy_(self._input[:used], non_blocking=True)
            results = self._there[used : used + count].zero_()
            self._launch(count, self._there.data_ptr(), results.data_ptr(), stream)
            self._output[:count].copy_(results, non_blocking=True)

    def _launch(self, count: int, inputs: int, results: int, stream: torch.cuda.Stream) -> None:
        shape, (blocks, pages) = self.shape, self._kernels
        seeds = c_void_p(inputs + 8 * count * shape.fragments)
        fragments, sums = c_void_p(inputs), c_void_p(self._sums.data_ptr())
        number, a_page, summed = c_uint(count), c_uint(shape.fragments), c_uint(shape.blocks)
        work = count * shape.blocks * _THREADS_A_PAGE
        if work:
            given = (fragments, seeds, number, a_page, c_uint(shape.blocks_a_fragment), summed, sums)
            grid = min(_BLOCKS, -(-work // _THREADS))
            driver().launch(blocks, grid, _THREADS, stream.cuda_stream, pointers(given))
        nbytes = c_uint64(shape.fragment_nbytes)
        last = (fragments, seeds, number, a_page, summed, nbytes, sums, c_void_p(results))
        grid = -(-count * _THREADS_A_PAGE // _PAGE_THREADS)
        driver().launch(pages, grid, _PAGE_THREADS, stream.cuda_stream, pointers(last))

    def take(self, count: int) -> Words:
        """Return the checksums of the last call, `uint64 [count]`; the stream must have got there."""
        found = self._output.numpy().view(np.uint64)[:count]
        return finish(found, self.shape.nbytes)


@cache
def checksum_support(index: int) -> Support:
    """Return whether the kernels can be compiled and loaded on a device."""
    for found in (driver_support(), compiler()):
        if not found:
            return found
    try:
        with torch.cuda.device(index):
            torch.empty(1, device=f"cuda:{index}")  # makes the context that the module is loaded into
            _functions(index)
    except (CompileError, DriverError) as error:
        return Support(ok=False, reason=str(error))
    return Support(ok=True)


@cache
def _functions(index: int) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(index)
    module = driver().load_module(compile_cubin("checksum.cu", {}, f"sm_{major}{minor}"))
    return driver().function(module, "block_sums"), driver().function(module, "page_sums")
