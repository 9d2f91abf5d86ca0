"""Checksums of pages that lie on a device: by kernels there, or, where those cannot run, of a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from hicache_tier_kernels.checksum import LEAST_NBYTES, PageChecksums, PageShape, checksum_support

from .checksum import page_checksum
from .device_bytes import DeviceBytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]


class Summer(Protocol):
    """Computes checksums of some pages at a time."""

    def submit(self, addresses: Words, seeds: Words) -> None:
        """Begin with pages whose fragments lie at `addresses`, `[n, F]`; on a stream."""

    def take(self) -> Words:
        """Return the checksums of the last call, once the stream has got there."""


class KernelSummer:
    """Checksums by kernels on a stream."""

    def __init__(self, shape: PageShape, pages: int, stream: torch.cuda.Stream) -> None:
        self._sums = PageChecksums(stream.device, shape, pages)
        self._stream = stream
        self._count = 0

    def submit(self, addresses: Words, seeds: Words) -> None:
        """Enqueue the kernels."""
        self._count = len(seeds)
        self._sums.submit(addresses, seeds, self._stream)

    def take(self) -> Words:
        """Return what they found."""
        return self._sums.take(self._count)


class CopySummer:
    """Checksums of copies in host memory: slower, and the same."""

    def __init__(self, fragment_nbytes: int, stream: torch.cuda.Stream) -> None:
        self._nbytes, self._stream = fragment_nbytes, stream
        self._addresses: Words = np.empty((0, 1), np.uint64)
        self._seeds: Words = np.empty(0, np.uint64)

    def submit(self, addresses: Words, seeds: Words) -> None:
        """Remember the pages; they must not change before `take`."""
        self._addresses, self._seeds = addresses, seeds

    def take(self) -> Words:
        """Copy the pages and compute their checksums."""
        found = np.empty(len(self._seeds), np.uint64)
        for page, (row, seed) in enumerate(zip(self._addresses.tolist(), self._seeds.tolist(), strict=True)):
            with torch.cuda.stream(self._stream):
                parts = [
                    torch.as_tensor(DeviceBytes(address, self._nbytes), device=self._stream.device).cpu()
                    for address in row
                ]
            addresses = [part.data_ptr() for part in parts]
            found[page] = page_checksum(addresses, [self._nbytes] * len(row), seed)
        return found


def summer(fragments: int, fragment_nbytes: int, pages: int, stream: torch.cuda.Stream) -> Summer:
    """Return what computes checksums of up to `pages` pages of some fragments each."""
    index = stream.device.index or 0
    if fragments * fragment_nbytes >= LEAST_NBYTES and checksum_support(index):
        return KernelSummer(PageShape(fragments, fragment_nbytes), pages, stream)
    return CopySummer(fragment_nbytes, stream)
