"""Byte engine `kvikio` for pages in host memory: one handle a slab, kept open, many futures in flight.

Handles for reads and for writes are apart, so that put and get do not wait for each other; two batches in one
direction take turns. What kvikio cannot do well goes by `posix`: pages in many small pieces, and the pages
whose transfer failed, one by one, for a verdict on each.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from .descriptors import describe, parts
from .kvikio_package import compat_mode, kvikio_module
from .posix import PosixEngine, open_reason
from .retry import retry
from .slab import SlabDamagedError

if TYPE_CHECKING:
    from .engine import PageBatch
    from .slab import StoreFile

_LOG = logging.getLogger(__name__)
_HANDLES = 8
_DEADLINE_S = 60.0
_MIN_PIECE_NBYTES = 4096


class KvikioEngine:
    """Host pages to files and back through `kvikio.CuFile`.

    Parameters
    ----------
    direct : bool
        For the pages that go by `posix`; how kvikio opens a file is up to its own settings.
    threads : int, optional
        Of `posix`; kvikio has its own number (`KVIKIO_NTHREADS`).
    deadline_s : float
        Longest wait for one part of a batch (32 MiB at most). Past it, its pages get the verdict `timeout`.
    min_piece_nbytes : int
        Pages whose pieces are smaller on average go by `posix`.

    Attributes
    ----------
    retried_pages : int
        Pages that were moved one by one because their transfer failed.

    Raises
    ------
    EngineUnavailableError
        Where kvikio cannot be imported.
    """

    name = "kvikio"

    def __init__(
        self,
        *,
        direct: bool,
        threads: int | None = None,
        deadline_s: float = _DEADLINE_S,
        min_piece_nbytes: int = _MIN_PIECE_NBYTES,
    ) -> None:
        kvikio_module()
        self._plain = PosixEngine(direct=direct, threads=threads)
        self._deadline_s = deadline_s
        self._min_piece_nbytes = min_piece_nbytes
        self._pid = os.getpid()
        self._locks = {True: threading.Lock(), False: threading.Lock()}  # by "for writing"
        self._closed = False
        self._handles: dict[bool, dict[StoreFile, Any]] = {True: {}, False: {}}
        self.retried_pages = 0

    @property
    def mode(self) -> str:
        """What moves, and kvikio's compatibility mode as it is."""
        return f"host memory, compat mode {compat_mode()}"

    def write(self, batch: PageBatch) -> list[str]:
        """Write every page; "" or a reason for each."""
        return self._move(batch, write=True)

    def read(self, batch: PageBatch) -> list[str]:
        """Read every page; "" or a reason for each."""
        return self._move(batch, write=False)

    def close(self) -> None:
        """Close the handles."""
        self._plain.close()
        if os.getpid() != self._pid:
            return
        self._closed = True
        for write, lock in self._locks.items():
            with lock:
                self._trim(0, write=write)

    # -- handles ---------------------------------------------------------------------------------------

    def _trim(self, most: int, *, write: bool) -> None:
        """Close handles of files that were removed, and the least recently used. Needs the lock."""
        handles = self._handles[write]
        for file in [file for file, handle in handles.items() if not os.fstat(handle.fileno()).st_nlink]:
            handles.pop(file).close()
        for file in list(handles)[: max(0, len(handles) - most)]:
            handles.pop(file).close()

    def _leak(self, *, write: bool) -> None:
        """Keep handles open for ever whose I/O may not have ended."""
        for handle in self._handles[write].values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
        self._handles[write].clear()

    def _handle(self, file: StoreFile, *, write: bool) -> Any:  # noqa: ANN401 - of the package
        """Return an open handle of the very file that the store made.

        Raises
        ------
        SlabDamagedError, OSError
        """
        handles = self._handles[write]
        handle = handles.pop(file, None)
        if handle is None:
            with file.open(direct=False):  # says what is wrong as the other engines do
                pass
            handle = kvikio_module().CuFile(file.path, "r+" if write else "r")
        try:
            file.check(handle.fileno())
        except SlabDamagedError:
            handle.close()
            raise
        handles[file] = handle  # most recently used last
        return handle

    # -- moving ----------------------------------------------------------------------------------------

    def _move(self, batch: PageBatch, *, write: bool) -> list[str]:
        count = len(batch)
        if self._closed or os.getpid() != self._pid:
            return ["engine_error: the engine is closed, or was made by another process"] * count
        if not count:
            return []
        if batch.page_nbytes < batch.addresses.shape[1] * self._min_piece_nbytes:
            return self._plain.write(batch) if write else self._plain.read(batch)
        verdicts = [""] * count
        again: list[int] = []
        with self._locks[write]:
            self._trim(_HANDLES, write=write)
            for first, last in parts(batch, 0, count, 1):
                again += self._part(batch, first, last, verdicts, write=write)
        if again:
            self.retried_pages += len(again)
            retry(self._plain, batch, again, verdicts, write=write)
        return verdicts

    def _part(
        self, batch: PageBatch, first: int, last: int, verdicts: list[str], *, write: bool
    ) -> list[int]:
        """Move some pages; return those that have to be tried again."""
        handles: list[Any] = []
        numbers: dict[StoreFile, int] = {}
        for at in range(first, last):
            file = batch.files[at]
            if file not in numbers:
                opened = self._open(file, write=write)
                if isinstance(opened, str):
                    verdicts[at] = opened
                else:
                    numbers[file] = len(handles)
                    handles.append(opened)
        good = [at for at in range(first, last) if not verdicts[at]]
        moving = []
        for at in good:
            if write and batch.hook:
                batch.hook(at, at + 1)
            pieces = describe(batch, at, at + 1, [numbers[batch.files[at]]])
            moving.append(self._start(pieces.memory, pieces.files, handles, write=write))
        return self._finish(batch, dict(zip(good, moving, strict=True)), verdicts, write=write)

    def _open(self, file: StoreFile, *, write: bool) -> Any:  # noqa: ANN401 - of the package
        """Return an open handle, or the verdict on pages of a file that has none."""
        if write and not file.writable:
            return "access_denied"
        try:
            return self._handle(file, write=write)
        except SlabDamagedError as damage:
            return f"damaged: {damage}"
        except OSError as failure:
            return open_reason(failure)
        except RuntimeError as failure:
            return f"io_error: {failure}"

    def _finish(
        self, batch: PageBatch, moving: dict[int, list[Any]], verdicts: list[str], *, write: bool
    ) -> list[int]:
        """Wait for the pages under way; return those that have to be tried again."""
        until = time.monotonic() + self._deadline_s
        again = []
        for at, futures in moving.items():
            outcome = _wait(futures, until)
            if outcome == "timeout":
                self._leak(write=write)
                verdicts[at] = f"timeout: no end after {self._deadline_s:.0f} s"
            elif outcome:
                _LOG.debug("kvikio: %s", outcome)
                again.append(at)
            elif not write and batch.hook:
                batch.hook(at, at + 1)
        return again

    @staticmethod
    def _start(memory: Any, files: Any, handles: list[Any], *, write: bool) -> list[Any]:  # noqa: ANN401
        futures: list[Any] = []
        for (address, nbytes, _), (offset, _, number) in zip(memory.tolist(), files.tolist(), strict=True):
            raw = (ctypes.c_uint8 * nbytes).from_address(address)
            view = np.frombuffer(raw, np.uint8)
            handle = handles[number]
            try:
                call = handle.pwrite if write else handle.pread
                futures.append((call(view, file_offset=offset), nbytes))
            except Exception as error:  # noqa: BLE001 - it becomes a retry of this page
                futures.append((error, nbytes))
        return futures


def _wait(futures: list[Any], until: float) -> str:
    """Wait for a page's futures; return "", `timeout`, or what went wrong."""
    trouble = ""
    for future, nbytes in futures:
        if isinstance(future, Exception):
            trouble = trouble or str(future)
            continue
        pause = 50e-6
        while not future.done():
            if time.monotonic() > until:
                return "timeout"
            time.sleep(pause)
            pause = min(2e-3, 2 * pause)
        moved = -1
        with suppress(Exception):  # what it says is not needed: the page is tried once more
            moved = future.get()
        if moved != nbytes:
            trouble = trouble or f"{moved} of {nbytes} bytes were moved"
    return trouble
