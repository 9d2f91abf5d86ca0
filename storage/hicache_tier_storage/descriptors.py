"""Descriptors of a transfer: where each piece of pages lies in memory, and where in a file.

NIXL and kvikio take one address, length and file each and have no vectored I/O: pieces that follow each other
in memory and in the file are merged here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .engine import PageBatch
    from .slab import StoreFile

MAX_DESCRIPTORS = 2048  # a transfer; an agent's queue is made for as many
MERGED_NBYTES = 1 << 20
_PART_NBYTES = 32 << 20
_PART_MIN_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Rows of (address or offset, length, device): one a piece, the same number on both sides.

    Attributes
    ----------
    memory, files : uint64 [n, 3]
    pages : int64 [n]
        Page in which each piece starts.
    """

    memory: NDArray[np.uint64]
    files: NDArray[np.uint64]
    pages: NDArray[np.int64]


def describe(
    batch: PageBatch, first: int, last: int, fds: list[int], merged_nbytes: int = MERGED_NBYTES
) -> Descriptors:
    """Describe pages `first..last-1`.

    Parameters
    ----------
    batch : PageBatch
    first, last : int
    fds : list of int
        Numbers of their files, one a page.
    merged_nbytes : int
        Pages that follow each other are merged up to so many bytes.
    """
    pages, pieces = last - first, batch.addresses.shape[1]
    ends = np.cumsum(batch.nbytes)
    addresses = batch.addresses[first:last].reshape(-1)
    lengths = np.tile(batch.nbytes, pages)
    offsets = batch.offsets[first:last].astype(np.uint64)[:, None] + (ends - batch.nbytes)[None]
    offsets = offsets.reshape(-1)
    devices = np.repeat(np.array(fds, np.uint64), pieces)
    joined = np.zeros(len(addresses), np.bool_)
    joined[1:] = (
        (addresses[1:] == addresses[:-1] + lengths[:-1])
        & (offsets[1:] == offsets[:-1] + lengths[:-1])
        & (devices[1:] == devices[:-1])
    )
    joined[:: pieces * max(1, merged_nbytes // batch.page_nbytes)] = False
    starts = np.flatnonzero(~joined)
    memory = np.zeros((len(starts), 3), np.uint64)
    files = np.empty((len(starts), 3), np.uint64)
    memory[:, 0], files[:, 0] = addresses[starts], offsets[starts]
    memory[:, 1] = files[:, 1] = np.add.reduceat(lengths, starts)
    files[:, 2] = devices[starts]
    if batch.memory is not None:
        memory[:, 2] = batch.memory.device
    return Descriptors(memory, files, first + starts // pieces)


def hull(batch: PageBatch) -> tuple[int, int]:
    """Return first and last address of a batch's memory."""
    return int(batch.addresses.min()), int((batch.addresses + batch.nbytes).max())


def file_groups(files: list[StoreFile], most: int) -> Iterator[tuple[int, int]]:
    """Cut a batch where it would touch more than `most` files at once."""
    if files.count(files[0]) == len(files):
        yield 0, len(files)
        return
    start = 0
    seen: set[StoreFile] = set()
    for at, file in enumerate(files):
        if file not in seen and len(seen) == most:
            yield start, at
            start, seen = at, set()
        seen.add(file)
    yield start, len(files)


def parts(batch: PageBatch, first: int, last: int, lanes: int) -> Iterator[tuple[int, int]]:
    """Cut pages into transfers: small enough for a queue, large enough to be few, one a lane at least."""
    share = (last - first) * batch.page_nbytes // lanes
    nbytes = min(_PART_NBYTES, max(_PART_MIN_NBYTES, share))
    most = max(1, min(-(-nbytes // batch.page_nbytes), MAX_DESCRIPTORS // batch.addresses.shape[1]))
    for at in range(first, last, most):
        yield at, min(at + most, last)


def good_runs(verdicts: list[str], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield runs of pages of `first..last-1` that have no verdict against them."""
    start = first
    for at in range(first, last) if any(verdicts[first:last]) else ():
        if verdicts[at]:
            if at > start:
                yield start, at
            start = at + 1
    if last > start:
        yield start, last
