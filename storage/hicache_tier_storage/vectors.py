"""Memory vectors for `pwritev`/`preadv`, laid out by NumPy and handed over through ctypes.

ctypes lets go of the GIL for the length of a call, and a batch needs no Python object a segment.
"""

from __future__ import annotations

import ctypes
import errno
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .engine import PageBatch

IOV_MAX = 1024
DIRECT_ALIGNMENT = 512
_RUN_NBYTES = 2 << 20
_RUN_MIN_NBYTES = 256 << 10

_LIBC = ctypes.CDLL(None, use_errno=True)
PWRITEV, PREADV = _LIBC.pwritev64, _LIBC.preadv64
for _call in (PWRITEV, PREADV):
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    _call.restype = ctypes.c_ssize_t

Iov = np.ndarray[tuple[int, int], np.dtype[np.uint64]]


class Run(NamedTuple):
    """Pages of one file whose slots follow each other, ready for one call."""

    first: int
    last: int
    pointer: int
    vectors: int
    offset: int
    nbytes: int


class RunPlan:
    """How a batch is cut into runs, and the memory vectors of each.

    Parameters
    ----------
    batch : PageBatch
    pad_address : int
        4096 bytes of memory that what lies between a page and its stride is written from and read into.
    most_nbytes : int, optional
        Of one vector.
    """

    def __init__(self, batch: PageBatch, pad_address: int, most_nbytes: int | None = None) -> None:
        addresses, nbytes = batch.addresses, batch.nbytes
        if most_nbytes is not None and int(nbytes.max()) > most_nbytes:
            addresses, nbytes = _cut(addresses, nbytes, most_nbytes)
        count, segments = addresses.shape
        gap = batch.stride - batch.page_nbytes
        self._per_page = segments + (1 if gap else 0)
        iov = np.empty((count, self._per_page, 2), np.uint64)
        iov[:, :segments, 0] = addresses
        iov[:, :segments, 1] = nbytes
        if gap:
            iov[:, segments, 0] = pad_address
            iov[:, segments, 1] = gap
        self._iov = iov.reshape(-1, 2)
        self._gap = gap
        self._batch = batch

    def iov(self, page: int) -> Iov:
        """Vectors of one page, without the gap behind it."""
        first = page * self._per_page
        return self._iov[first : first + self._per_page - (1 if self._gap else 0)]

    def aligned(self) -> bool:
        """Whether O_DIRECT takes the memory as it is."""
        batch = self._batch
        bits = int(np.bitwise_or.reduce(batch.addresses, axis=None) | np.bitwise_or.reduce(batch.nbytes))
        return not bits % DIRECT_ALIGNMENT and not batch.stride % DIRECT_ALIGNMENT

    def groups(self, threads: int, most_files: int) -> Iterator[list[Run]]:
        """Yield runs in groups that touch at most `most_files` files."""
        files = self._batch.files
        if files.count(files[0]) == len(files):
            yield list(self._runs(0, len(files), threads))
            return
        starts = [0, *(i for i in range(1, len(files)) if files[i] is not files[i - 1]), len(files)]
        for at in range(0, len(starts) - 1, most_files):
            part = starts[at : at + most_files + 1]
            yield [run for first, last in pairwise(part) for run in self._runs(first, last, threads)]

    def _runs(self, first: int, last: int, threads: int) -> Iterator[Run]:
        """Cut pages of one file where slots do not follow, and into pieces that keep all threads busy."""
        batch, per_page, gap = self._batch, self._per_page, self._gap
        share = len(batch) * batch.stride // (2 * threads)
        nbytes = min(_RUN_NBYTES, max(_RUN_MIN_NBYTES, share))
        most = max(1, min(nbytes // batch.stride, IOV_MAX // per_page))
        offsets = batch.offsets[first:last]
        breaks = np.flatnonzero(np.diff(offsets) != batch.stride) + (first + 1)
        base, positions = self._iov.ctypes.data, batch.offsets.tolist()
        start = first
        for stop in [*breaks.tolist(), last]:
            for at in range(start, stop, most):
                end = min(at + most, stop)
                yield Run(
                    at,
                    end,
                    base + 16 * at * per_page,
                    (end - at) * per_page - (1 if gap else 0),
                    positions[at],
                    (end - at) * batch.stride - gap,
                )
            start = stop


def _cut(
    addresses: NDArray[np.uint64], nbytes: NDArray[np.uint64], most: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Cut segments into pieces of at most so many bytes."""
    pieces = [
        (column, at, min(most, whole - at))
        for column, whole in enumerate(nbytes.tolist())
        for at in range(0, whole, most)
    ]
    columns, starts, lengths = (list(part) for part in zip(*pieces, strict=True))
    return addresses[:, columns] + np.array(starts, np.uint64), np.array(lengths, np.uint64)


def write_in_pieces(fd: int, run: Run, most: int) -> int:
    """Write a run by calls of at most so many bytes, or one vector; as `pwritev` otherwise."""
    raw = (ctypes.c_uint64 * (2 * run.vectors)).from_address(run.pointer)
    ends = np.cumsum(np.ctypeslib.as_array(raw)[1::2]).tolist()
    first = done = 0
    while first < run.vectors:
        last = max(first + 1, bisect_right(ends, done + most))
        if PWRITEV(fd, run.pointer + 16 * first, last - first, run.offset + done) != ends[last - 1] - done:
            return done
        first, done = last, ends[last - 1]
    return done


def vector_io(fd: int, iov: Iov, offset: int, *, write: bool) -> int:
    """Move all bytes of `iov` at `offset`, however many calls it takes; return 0 or an errno.

    A read that meets the end of the file is EIO.
    """
    call = PWRITEV if write else PREADV
    ends = np.cumsum(iov[:, 1])
    expected, done = int(ends[-1]), 0
    while done < expected:
        first = int(np.searchsorted(ends, done, side="right"))
        part = iov[first : first + IOV_MAX].copy()
        skip = np.uint64(done - (int(ends[first - 1]) if first else 0))
        part[0, 0] += skip
        part[0, 1] -= skip
        moved = call(fd, part.ctypes.data, len(part), offset + done)
        if moved > 0:
            done += moved
        elif moved == 0:
            return errno.EIO
        else:
            error = ctypes.get_errno()
            if error != errno.EINTR:
                return error
    return 0
