"""Byte engine `posix`: vectored `pwritev`/`preadv` by a few threads, O_DIRECT where the directory takes it.

Pages whose slots follow each other travel in one call.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from .daemon_pool import DaemonPool
from .landing import LeasedBatch
from .posix_landing import Landing, LandingBuffer
from .shared_work import SharedWork
from .slab import SlabDamagedError, StoreFile
from .vectors import PREADV, PWRITEV, Iov, Run, RunPlan, vector_io, write_in_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .engine import PageBatch

_LOG = logging.getLogger(__name__)
MOST_THREADS = 8  # of an engine that is not told how many
_FILES_AT_ONCE = 8
_ALONE_S = 1.0  # how long no thread is asked for after one could not be started
_REASONS = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EACCES: "access_denied",
    errno.EPERM: "access_denied",
    errno.EROFS: "read_only",
    errno.EMFILE: "too_many_files",
    errno.ENFILE: "too_many_files",
}


def default_threads() -> int:
    """Threads that keep a local NVMe busy without crowding the host's cores."""
    return min(MOST_THREADS, 2 * (os.cpu_count() or 1))


class PosixEngine:
    """Vectored I/O on ordinary files.

    Parameters
    ----------
    direct : bool
        Use O_DIRECT. Where memory is not aligned a bounce buffer is used; where the medium refuses at run
        time the engine goes on with buffered I/O and says so once.
    threads : int, optional
        I/O threads, the caller's included.
    write_nbytes : int, optional
        The most that one call writes; without it, runs of pages. For large calls the page cache takes large
        blocks of memory, which the host of a virtual machine may first have to find; each call is one more
        wait for the interpreter where other threads use it.
    """

    name = "posix"
    holds_batches = True  # its threads do
    lands = True

    def __init__(self, *, direct: bool, threads: int | None = None, write_nbytes: int | None = None) -> None:
        self._direct = direct
        self._write_nbytes = write_nbytes
        self._threads = max(1, threads or default_threads())
        self._pool = DaemonPool(max(1, self._threads - 1), "hct-io")
        self._alone_until = 0.0
        self._bounce = threading.local()
        self._landing = threading.local()
        self._pad = mmap.mmap(-1, 4096)
        self._pad_address = ctypes.addressof(ctypes.c_char.from_buffer(self._pad))

    @property
    def mode(self) -> str:
        """`direct` or `buffered`."""
        return "direct" if self._direct else "buffered"

    @property
    def write_nbytes(self) -> int | None:
        """The most that one call writes, where there is a bound."""
        return self._write_nbytes

    def write(self, batch: PageBatch) -> list[str]:
        """Write every page; "" or a reason for each."""
        return self._move(batch, write=True)

    def read(self, batch: PageBatch) -> list[str]:
        """Read every page; "" or a reason for each."""
        return self._move(batch, write=False)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()

    def _move(self, batch: PageBatch, *, write: bool) -> list[str]:
        verdicts = [""] * len(batch)
        if not verdicts:
            return verdicts
        move = _Move(self, batch, verdicts, write=write)
        for runs in move.plan.groups(self._threads, _FILES_AT_ONCE):
            with ExitStack() as opened:
                shared = SharedWork(move.work, move.open(runs, opened))
                try:
                    self._ask_for_help(shared, min(self._threads, len(runs)) - 1)
                    move.work(shared.parts)
                finally:
                    shared.end()  # whatever happened, nobody touches the memory any more
                if shared.failure is not None:
                    raise shared.failure
        return verdicts

    def _ask_for_help(self, shared: SharedWork[tuple[int, Run]], helpers: int) -> None:
        """Let other threads take part; where none can be started the caller does the work alone."""
        if helpers and time.monotonic() < self._alone_until:
            return
        try:
            for _ in range(helpers):
                self._pool.submit(shared.help)  # which is queued even where this raises
        except Exception as error:  # noqa: BLE001 - RuntimeError, MemoryError: the work goes on without
            if not self._alone_until:
                _LOG.warning("no I/O thread can be started (%s): going on with fewer.", error)
            self._alone_until = time.monotonic() + _ALONE_S

    def fall_back(self, directory: object) -> None:
        """Go on without O_DIRECT, saying so once."""
        if self._direct:
            self._direct = False
            _LOG.warning("O_DIRECT was refused in %s: going on with buffered I/O.", directory)

    @staticmethod
    def reason(error: int) -> str:
        """Return the verdict for an errno."""
        return _reason(error)

    def landing(self, nbytes: int) -> LandingBuffer:
        """Return this thread's landing buffer, of at least `nbytes`."""
        buffer: LandingBuffer | None = getattr(self._landing, "buffer", None)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._landing.buffer = LandingBuffer(nbytes)
        return buffer

    @property
    def pad_address(self) -> int:
        """Memory for what lies between a page and its stride."""
        return self._pad_address

    def bounce(self, nbytes: int) -> int:
        """Return the address of this thread's aligned buffer of at least `nbytes`."""
        buffer = getattr(self._bounce, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = mmap.mmap(-1, nbytes)
            self._bounce.buffer = buffer
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class _Move:
    """One batch on its way: a fast path of one call a run, and a careful path of one page at a time."""

    def __init__(self, engine: PosixEngine, batch: PageBatch, verdicts: list[str], *, write: bool) -> None:
        self._engine, self._batch, self._verdicts, self._write = engine, batch, verdicts, write
        self._pieces = engine.write_nbytes if write else None
        self.plan = RunPlan(batch, engine.pad_address, self._pieces)
        self._direct = engine.mode == "direct"
        self._bounced = self._direct and not self.plan.aligned()
        self._landing: Landing | None = None
        if isinstance(batch, LeasedBatch) and batch.lease is not None and not write:
            self._landing = Landing(engine, batch, self.plan, batch.lease, verdicts)

    def open(self, runs: list[Run], opened: ExitStack) -> list[tuple[int, Run]]:
        """Open the files of these runs; pages of a file that cannot be opened get their verdict here."""
        found: list[tuple[int, Run]] = []
        descriptors: dict[StoreFile, int | str] = {}
        for run in runs:
            file = self._batch.files[run.first]
            if file not in descriptors:
                try:
                    descriptors[file] = opened.enter_context(file.open(direct=self._direct))
                except SlabDamagedError as damage:
                    descriptors[file] = f"damaged: {damage}"
                except OSError as failure:
                    descriptors[file] = open_reason(failure)
            fd = descriptors[file]
            if isinstance(fd, int):
                found.append((fd, run))
            else:
                self._verdicts[run.first : run.last] = [fd] * (run.last - run.first)
        return found

    def work(self, runs: Iterator[tuple[int, Run]]) -> None:
        """Move runs until there are no more; several threads share the iterator."""
        write, hook = self._write, self._batch.hook
        for fd, run in runs:
            if self._landing is not None:
                self._landing.read(fd, run)
                continue
            if write and hook:
                hook(run.first, run.last)
            if self._bounced or self._call(fd, run) != run.nbytes:
                for page in range(run.first, run.last):
                    self._verdicts[page] = self._one(fd, page)
                    if not write and hook and not self._verdicts[page]:
                        hook(page, page + 1)
            elif not write and hook:
                hook(run.first, run.last)

    def _call(self, fd: int, run: Run) -> int:
        """Move a run; return how many bytes were."""
        if not self._write:
            return PREADV(fd, run.pointer, run.vectors, run.offset)  # type: ignore[no-any-return]
        if self._pieces is None:
            return PWRITEV(fd, run.pointer, run.vectors, run.offset)  # type: ignore[no-any-return]
        return write_in_pieces(fd, run, self._pieces)

    def _one(self, fd: int, page: int) -> str:
        """Move one page with all care; "" or a reason."""
        offset = int(self._batch.offsets[page])
        if self._bounced:
            error = self._through_bounce(fd, page, offset)
        else:
            error = vector_io(fd, self.plan.iov(page), offset, write=self._write)
        if error == errno.EINVAL and self._direct:
            file = self._batch.files[page]
            self._engine.fall_back(file.path.parent)
            try:
                with file.open(direct=False) as buffered:
                    error = vector_io(buffered, self.plan.iov(page), offset, write=self._write)
            except SlabDamagedError as damage:
                return f"damaged: {damage}"
            except OSError as failure:
                error = failure.errno or errno.EIO
        return _reason(error) if error else ""

    def _through_bounce(self, fd: int, page: int, offset: int) -> int:
        stride = self._batch.stride
        address = self._engine.bounce(stride)
        whole: Iov = np.array([[address, stride]], np.uint64)
        if self._write:
            self._copy(page, address)
        error = vector_io(fd, whole, offset, write=self._write)
        if not self._write and not error:
            self._copy(page, address)
        return error

    def _copy(self, page: int, address: int) -> None:
        """Copy a page's segments to the bounce buffer, or back."""
        segments = self._batch.addresses[page].tolist()
        for segment, nbytes in zip(segments, self._batch.nbytes.tolist(), strict=True):
            if self._write:
                ctypes.memmove(address, segment, nbytes)
            else:
                ctypes.memmove(segment, address, nbytes)
            address += nbytes


def open_reason(failure: OSError) -> str:
    """Return the verdict on pages of a file that cannot be opened."""
    return _reason(failure.errno or errno.EIO)


def _reason(error: int) -> str:
    return _REASONS.get(error) or f"io_error: {os.strerror(error)}"
