"""Byte engine `posix`: vectored `pwritev`/`preadv` by a few threads, O_DIRECT where the directory takes it.

Pages whose slots follow each other travel in one call. Addresses and lengths are laid out for the kernel by
NumPy and handed over through ctypes, which lets go of the GIL, so a batch costs Python a few calls.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from .slab import SlabDamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .engine import PageBatch

_LOG = logging.getLogger(__name__)
_IOV_MAX = 1024
_RUN_NBYTES = 2 << 20
_RUN_MIN_NBYTES = 256 << 10
DIRECT_ALIGNMENT = 512

_LIBC = ctypes.CDLL(None, use_errno=True)
_PWRITEV, _PREADV = _LIBC.pwritev64, _LIBC.preadv64
for _call in (_PWRITEV, _PREADV):
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    _call.restype = ctypes.c_ssize_t

Iov = np.ndarray[tuple[int, int], np.dtype[np.uint64]]


def default_threads() -> int:
    """Threads that keep a local NVMe busy without crowding the host's cores."""
    return min(8, 2 * (os.cpu_count() or 1))


class PosixEngine:
    """Vectored I/O on ordinary files.

    Parameters
    ----------
    direct : bool
        Use O_DIRECT. Where memory is not aligned a bounce buffer is used; where the medium refuses at run
        time the engine goes on with buffered I/O and says so once.
    threads : int, optional
        I/O threads, the caller's included.
    """

    name = "posix"

    def __init__(self, *, direct: bool, threads: int | None = None) -> None:
        self._direct = direct
        self._threads = max(1, threads or default_threads())
        self._pool = ThreadPoolExecutor(max(1, self._threads - 1), thread_name_prefix="hct-io")
        self._bounce = threading.local()
        self._pad = mmap.mmap(-1, 4096)  # what is read between a page and its stride lands here
        self._pad_address = ctypes.addressof(ctypes.c_char.from_buffer(self._pad))

    @property
    def mode(self) -> str:
        """`direct` or `buffered`."""
        return "direct" if self._direct else "buffered"

    def write(self, batch: PageBatch) -> list[str]:
        """Write every page; "" or a reason for each."""
        return self._move(batch, write=True)

    def read(self, batch: PageBatch) -> list[str]:
        """Read every page; "" or a reason for each."""
        return self._move(batch, write=False)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _move(self, batch: PageBatch, *, write: bool) -> list[str]:
        verdicts = [""] * len(batch)
        if not verdicts:
            return verdicts
        plan = _Plan(batch, self._pad_address, direct=self._direct)
        runs = iter(list(plan.runs(self._threads)))

        def work() -> None:
            for first, last in runs:
                self._run(batch, plan, first, last, verdicts, write=write)

        helpers = min(self._threads, plan.count) - 1
        futures = [self._pool.submit(work) for _ in range(helpers)]
        work()
        for future in futures:
            future.result()
        return verdicts

    def _run(
        self, batch: PageBatch, plan: _Plan, first: int, last: int, verdicts: list[str], *, write: bool
    ) -> None:
        """Move pages `first..last-1` of one file whose slots follow each other."""
        if write and batch.hook:
            batch.hook(first, last)
        reason = self._transfer(batch, plan, first, last, write=write)
        if reason and last - first > 1:
            for page in range(first, last):
                verdicts[page] = self._transfer(batch, plan, page, page + 1, write=write)
        elif reason:
            verdicts[first] = reason
        if not write and batch.hook:
            for page in range(first, last) if reason else ():
                if not verdicts[page]:
                    batch.hook(page, page + 1)
            if not reason:
                batch.hook(first, last)

    def _transfer(self, batch: PageBatch, plan: _Plan, first: int, last: int, *, write: bool) -> str:
        direct = self._direct
        try:
            with batch.files[first].open(direct=direct) as fd:
                if direct and not plan.aligned:
                    error = self._bounced(fd, batch, first, last, write=write)
                else:
                    iov = plan.iov_of(first, last)
                    error = vector_io(fd, iov, int(batch.offsets[first]), write=write)
        except SlabDamagedError as damage:
            return f"damaged: {damage}"
        except OSError as failure:
            error = failure.errno or errno.EIO
        if error == errno.EINVAL and direct:
            self._fall_back(batch.files[first].path.parent)
            return self._transfer(batch, plan, first, last, write=write)
        return "" if not error else _reason(error)

    def _fall_back(self, directory: object) -> None:
        if self._direct:
            self._direct = False
            _LOG.warning("O_DIRECT was refused in %s: going on with buffered I/O.", directory)

    def _bounced(self, fd: int, batch: PageBatch, first: int, last: int, *, write: bool) -> int:
        """Move through an aligned buffer, whole strides at a time."""
        stride = batch.stride
        address = self._bounce_buffer((last - first) * stride)
        iov: Iov = np.array([[address, (last - first) * stride]], np.uint64)
        if write:
            _copy_segments(batch, first, last, address, to_bounce=True)
        error = vector_io(fd, iov, int(batch.offsets[first]), write=write)
        if not write and not error:
            _copy_segments(batch, first, last, address, to_bounce=False)
        return error

    def _bounce_buffer(self, nbytes: int) -> int:
        buffer = getattr(self._bounce, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = mmap.mmap(-1, nbytes)
            self._bounce.buffer = buffer
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class _Plan:
    """Memory vectors of a batch, and how it is cut into runs."""

    def __init__(self, batch: PageBatch, pad_address: int, *, direct: bool) -> None:
        count, segments = batch.addresses.shape
        gap = batch.stride - batch.page_nbytes
        self._per_page = segments + (1 if gap else 0)
        iov = np.empty((count, self._per_page, 2), np.uint64)
        iov[:, :segments, 0] = batch.addresses
        iov[:, :segments, 1] = batch.nbytes
        if gap:
            iov[:, segments, 0] = pad_address
            iov[:, segments, 1] = gap
        self._iov = iov.reshape(-1, 2)
        self._gap = bool(gap)
        self._batch = batch
        self.aligned = not direct or _aligned(batch)
        self.count = 0

    def iov_of(self, first: int, last: int) -> Iov:
        """Vectors of pages `first..last-1`, without the gap behind the last."""
        end = last * self._per_page - (1 if self._gap else 0)
        return self._iov[first * self._per_page : end]

    def runs(self, threads: int) -> Iterator[tuple[int, int]]:
        """Cut the batch where slots or files do not follow, and into pieces that keep all threads busy."""
        batch = self._batch
        total = len(batch)
        share = total * batch.stride // (2 * threads)
        run_nbytes = min(_RUN_NBYTES, max(_RUN_MIN_NBYTES, share))
        most = max(1, min(run_nbytes // batch.stride, _IOV_MAX // self._per_page))
        follows = np.diff(batch.offsets) == batch.stride
        breaks = (np.flatnonzero(~follows) + 1).tolist()
        files = batch.files
        if files[0] is not files[-1]:
            breaks = sorted({*breaks, *(i for i in range(1, total) if files[i] is not files[i - 1])})
        start = 0
        for stop in [*breaks, total]:
            for first in range(start, stop, most):
                self.count += 1
                yield first, min(first + most, stop)
            start = stop


def _aligned(batch: PageBatch) -> bool:
    bits = np.bitwise_or.reduce(batch.addresses, axis=None) | np.bitwise_or.reduce(batch.nbytes, axis=None)
    return int(bits) % DIRECT_ALIGNMENT == 0 and batch.stride % DIRECT_ALIGNMENT == 0


def vector_io(fd: int, iov: Iov, offset: int, *, write: bool) -> int:
    """Move all bytes of `iov` at `offset`; return 0 or an errno (EIO for a short read)."""
    call = _PWRITEV if write else _PREADV
    at, count = iov.ctypes.data, len(iov)
    expected = int(iov[:, 1].sum())
    done = 0
    if count <= _IOV_MAX:
        moved = call(fd, at, count, offset)
        if moved == expected:
            return 0
        if moved < 0:
            error = ctypes.get_errno()
            if error != errno.EINTR:
                return error
            moved = 0
        elif moved == 0:
            return errno.EIO
        done = moved
    return _rest(fd, iov, offset, done, expected, write=write)


def _rest(fd: int, iov: Iov, offset: int, done: int, expected: int, *, write: bool) -> int:
    """Go on after a short transfer, or with more vectors than one call takes."""
    call = _PWRITEV if write else _PREADV
    ends = np.cumsum(iov[:, 1])
    while done < expected:
        first = int(np.searchsorted(ends, done, side="right"))
        part = iov[first : first + _IOV_MAX].copy()
        skip = done - (int(ends[first - 1]) if first else 0)
        part[0, 0] += np.uint64(skip)
        part[0, 1] -= np.uint64(skip)
        moved = call(fd, part.ctypes.data, len(part), offset + done)
        if moved < 0:
            error = ctypes.get_errno()
            if error != errno.EINTR:
                return error
        elif moved == 0:
            return errno.EIO
        else:
            done += moved
    return 0


def _copy_segments(batch: PageBatch, first: int, last: int, address: int, *, to_bounce: bool) -> None:
    lengths = batch.nbytes.tolist()
    for page in range(first, last):
        at = address + (page - first) * batch.stride
        sources = batch.addresses[page].tolist()
        for segment, nbytes in zip(sources, lengths, strict=True):
            if to_bounce:
                ctypes.memmove(at, segment, nbytes)
            else:
                ctypes.memmove(segment, at, nbytes)
            at += nbytes


def _reason(error: int) -> str:
    names = {
        errno.ENOSPC: "disk_full",
        errno.EDQUOT: "disk_full",
        errno.EACCES: "access_denied",
        errno.EPERM: "access_denied",
        errno.EROFS: "read_only",
        errno.EMFILE: "too_many_files",
        errno.ENFILE: "too_many_files",
    }
    return names.get(error) or f"io_error: {os.strerror(error)}"
