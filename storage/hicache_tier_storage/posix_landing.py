"""How the posix engine reads under a lease: from the page cache in place, from a device by way of its memory.

A read of what is in the page cache cannot hang, so it goes straight to the caller's pages while the lease is
held. A device may deliver late: what it delivers lands in memory of the engine's own, in one run however the
pages are cut up, and is copied from there.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .landing import ABANDONED
from .slab import SlabDamagedError
from .vectors import PREADV, Run, vector_io

if TYPE_CHECKING:
    from .landing import LeasedBatch
    from .lease import Lease
    from .posix import PosixEngine
    from .vectors import Iov, RunPlan

_LOG = logging.getLogger(__name__)


def _preadv2() -> Any:  # noqa: ANN401 - a function of the C library
    """Return the call, or None where the C library has none."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "preadv64v2", None)
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int]
        call.restype = ctypes.c_ssize_t
    return call


_PREADV2 = _preadv2()


class LandingBuffer:
    """Memory that a device reads to, and a file over it, so that one call copies from it to many places.

    Where no such file can be had, as with too many open files, it is plain memory, copied piece by piece.

    Parameters
    ----------
    nbytes : int

    Attributes
    ----------
    address, nbytes : int
    """

    def __init__(self, nbytes: int) -> None:
        self._fd: int | None = None
        try:
            self._fd, self._memory = _mapped_file(nbytes)
            weakref.finalize(self, os.close, self._fd)
        except OSError as error:
            _tell(error.strerror)
            self._memory = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.nbytes = nbytes

    def copy_to(self, run: Run) -> int:
        """Copy from its beginning to where a run's pages are wanted; return how many bytes were."""
        if self._fd is not None:
            return PREADV(self._fd, run.pointer, run.vectors, 0)  # type: ignore[no-any-return]
        raw = (ctypes.c_uint64 * (2 * run.vectors)).from_address(run.pointer)
        source = self.address
        for target, nbytes in zip(raw[::2], raw[1::2], strict=True):
            ctypes.memmove(target, source, nbytes)
            source += nbytes
        return source - self.address


def _mapped_file(nbytes: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("hct-landing", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return fd, mmap.mmap(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


@cache  # once a reason
def _tell(why: str | None) -> None:
    _LOG.warning("no file over memory can be had (%s): reads are copied piece by piece.", why)


class Landing:
    """Reads of one leased batch.

    Parameters
    ----------
    engine : PosixEngine
    batch : LeasedBatch
    plan : RunPlan
    lease : Lease
    verdicts : list of str
        Filled in.
    """

    def __init__(
        self, engine: PosixEngine, batch: LeasedBatch, plan: RunPlan, lease: Lease, verdicts: list[str]
    ) -> None:
        self._engine, self._batch, self._plan = engine, batch, plan
        self._lease, self._verdicts = lease, verdicts
        self._direct = engine.mode == "direct"

    def read(self, fd: int, run: Run) -> None:
        """Read a run of pages."""
        if not self._direct and _PREADV2 is not None and self._from_cache(fd, run):
            return
        nbytes = (run.last - run.first) * self._batch.stride
        buffer = self._engine.landing(nbytes)
        if self._lease.ended:
            self._verdicts[run.first : run.last] = [ABANDONED] * (run.last - run.first)
            return
        whole: Iov = np.array([[buffer.address, nbytes]], np.uint64)
        if PREADV(fd, whole.ctypes.data, 1, run.offset) == nbytes:
            self._copy(buffer, run)
            return
        for page in range(run.first, run.last):
            self._read_page(fd, page, buffer)

    def _from_cache(self, fd: int, run: Run) -> bool:
        """Read a run where all of it is in the page cache; False, and nothing is known of its pages, else."""
        if not self._enter(run.first, run.last):
            return True
        try:
            moved = _PREADV2(fd, run.pointer, run.vectors, run.offset, os.RWF_NOWAIT)
            if moved == run.nbytes:
                self._arrived(run.first, run.last)
            return bool(moved == run.nbytes)
        finally:
            self._lease.leave()

    def _read_page(self, fd: int, page: int, buffer: LandingBuffer) -> None:
        """Read one page with all care."""
        batch = self._batch
        whole: Iov = np.array([[buffer.address, batch.stride]], np.uint64)
        offset = int(batch.offsets[page])
        error = vector_io(fd, whole, offset, write=False)
        if error == errno.EINVAL and self._direct:
            file = batch.files[page]
            self._engine.fall_back(file.path.parent)
            try:
                with file.open(direct=False) as buffered:
                    error = vector_io(buffered, whole, offset, write=False)
            except SlabDamagedError as damage:
                self._verdicts[page] = f"damaged: {damage}"
                return
            except OSError as failure:
                error = failure.errno or errno.EIO
        if error:
            self._verdicts[page] = self._engine.reason(error)
            return
        iov = self._plan.iov(page)
        self._copy(buffer, Run(page, page + 1, iov.ctypes.data, len(iov), offset, batch.page_nbytes))

    def _copy(self, buffer: LandingBuffer, run: Run) -> None:
        """Copy pages from the buffer to where the caller wants them."""
        if not self._enter(run.first, run.last):
            return
        try:
            if buffer.copy_to(run) == run.nbytes:
                self._arrived(run.first, run.last)
            else:  # the caller's memory is not there
                failure = self._engine.reason(ctypes.get_errno() or errno.EFAULT)
                self._verdicts[run.first : run.last] = [failure] * (run.last - run.first)
        finally:
            self._lease.leave()

    def _arrived(self, first: int, last: int) -> None:
        if self._batch.hook:
            self._batch.hook(first, last)

    def _enter(self, first: int, last: int) -> bool:
        entered = self._lease.enter()
        if not entered:
            self._verdicts[first:last] = [ABANDONED] * (last - first)
        return entered
