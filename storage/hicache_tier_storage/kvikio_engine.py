"""Byte engine `kvikio` for pages in host or GPU memory: one handle a slab, kept open, many futures in flight.

Handles for reads and for writes are apart. What kvikio cannot do well goes by `posix`: pages in many small
pieces, and the pages whose transfer failed, one by one, for a verdict on each. Pages in GPU memory are tried
again by kvikio.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .descriptors import describe, good_runs, parts
from .device_bytes import DeviceBytes
from .engine import STILL_UNDER_WAY
from .flights import PartByPart, Settled, wait_through
from .kept_handles import KeptHandles
from .kvikio_package import compat_mode, kvikio_module, use_threads
from .posix import PosixEngine, default_threads, open_reason
from .registrations import Registrations
from .retry import retry
from .slab import SlabDamagedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from .descriptors import Descriptors
    from .engine import DeviceMemory, PageBatch
    from .kept_handles import Batch
    from .slab import StoreFile

_LOG = logging.getLogger(__name__)
_DEADLINE_S = 60.0
_MIN_PIECE_NBYTES = 4096
_TASK_NBYTES = 4 << 20  # kvikio cuts what is longer
_DEVICE_TASK_NBYTES = 2 << 20  # a ring has enough of them for all of kvikio's threads
_NOT_BEGUN = RuntimeError("it was not begun")


class KvikioEngine:
    """Pages to files and back through `kvikio.CuFile`.

    Parameters
    ----------
    direct : bool
        For the pages that go by `posix`; how kvikio opens a file is up to its own settings.
    threads : int, optional
        Of `posix`, and at least as many of kvikio, whose own default is one (`KVIKIO_NTHREADS` rules).
    deadline_s : float
        Longest wait for one part of a batch (of host memory: 32 MiB at most). Past it, its pages get the
        verdict `timeout`.
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
        use_threads(threads or default_threads())
        self._plain = PosixEngine(direct=direct, threads=threads)
        self._deadline_s = deadline_s
        self._min_piece_nbytes = min_piece_nbytes
        self._pid = os.getpid()
        self._closed = False
        self._handles = {True: KeptHandles(_open_to_write), False: KeptHandles(_open_to_read)}
        self._regions = Registrations(_register, _deregister)
        self.retried_pages = 0

    @property
    def mode(self) -> str:
        """What moves, and kvikio's compatibility mode as it is."""
        return f"host memory, compat mode {compat_mode()}"

    @property
    def device_mode(self) -> str:
        """The same of GPU memory."""
        return f"GPU memory, compat mode {compat_mode()}"

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
            self._regions.leak()
            return
        self._closed = True
        self._regions.close()
        for handles in self._handles.values():
            handles.close()

    # -- moving ----------------------------------------------------------------------------------------

    def start(self, batch: PageBatch, *, write: bool) -> PartByPart | Settled:
        """Begin to move pages in GPU memory; kvikio has threads of its own."""
        refused = self._refused(batch)
        if refused or batch.memory is None:
            return Settled(refused)
        self._regions.cover(batch.memory)
        verdicts = [""] * len(batch)
        return PartByPart(verdicts, self._device_parts(batch, verdicts, write=write))

    # -- moving ----------------------------------------------------------------------------------------

    def _refused(self, batch: PageBatch) -> list[str]:
        """Return the verdicts where nothing can be moved; none where it can."""
        if self._closed or os.getpid() != self._pid:
            return ["engine_error: the engine is closed, or was made by another process"] * len(batch)
        return []

    def _move(self, batch: PageBatch, *, write: bool) -> list[str]:
        refused = self._refused(batch)
        if refused or not len(batch):
            return refused
        if batch.memory is not None:
            return self.start(batch, write=write).run()
        if batch.page_nbytes < batch.addresses.shape[1] * self._min_piece_nbytes:
            return self._plain.write(batch) if write else self._plain.read(batch)
        verdicts = [""] * len(batch)
        return PartByPart(verdicts, self._host_parts(batch, verdicts, write=write)).run()

    def _device_parts(
        self, batch: PageBatch, verdicts: list[str], *, write: bool
    ) -> Generator[Callable[[], bool], None, None]:
        """Move all pages at once, then those that failed one by one."""
        with self._handles[write].batch() as handles:
            again = yield from self._part(batch, handles, 0, len(batch), verdicts, write=write)
            self.retried_pages += len(again)
            for page in again:
                failed = yield from self._part(batch, handles, page, page + 1, verdicts, write=write)
                for why in failed.values():
                    verdicts[page] = f"io_error: {why}"

    def _host_parts(
        self, batch: PageBatch, verdicts: list[str], *, write: bool
    ) -> Generator[Callable[[], bool], None, None]:
        """Move some pages at a time, then those that failed by `posix`."""
        again: dict[int, str] = {}
        with self._handles[write].batch() as handles:
            for first, last in parts(batch, 0, len(batch), 1):
                again |= yield from self._part(batch, handles, first, last, verdicts, write=write)
        self.retried_pages += len(again)
        if again:
            retry(self._plain, batch, sorted(again), verdicts, write=write)

    def _part(
        self, batch: PageBatch, kept: Batch, first: int, last: int, verdicts: list[str], *, write: bool
    ) -> Generator[Callable[[], bool], None, dict[int, str]]:
        """Move some pages; return those that have to be tried again, and why."""
        begun = _Begun(first)
        until = time.monotonic() + self._deadline_s
        try:
            self._begin(batch, kept, begun, last, verdicts, write=write)
            yield partial(_all_done, begun.futures(), until)
        except BaseException as interrupt:
            left = begun.futures()
            wait_through(partial(_all_done, left, until))
            if left or begun.lost:
                kept.forget()  # what is under way still uses these handles
                interrupt.add_note(STILL_UNDER_WAY)
            raise
        again: dict[int, str] = {}
        for pieces, futures, stop in begun.runs:
            again |= self._finish(batch, pieces, futures, stop, verdicts, write=write)
        if any(why.startswith("timeout") for why in verdicts[first:last]):
            kept.forget()
        refused = slice(begun.reached, last)
        verdicts[refused] = [why or begun.refusal for why in verdicts[refused]]
        return {page: why for page, why in again.items() if not verdicts[page]}

    def _begin(
        self, batch: PageBatch, kept: Batch, begun: _Begun, last: int, verdicts: list[str], *, write: bool
    ) -> None:
        """Hand pages on; those of a file that cannot be opened get their verdict here."""
        handles: list[Any] = []
        numbers: dict[StoreFile, int] = {}
        for at in range(begun.reached, last):
            file = batch.files[at]
            if file not in numbers:
                opened = _handle(kept, file, write=write)
                if isinstance(opened, str):
                    verdicts[at] = opened
                else:
                    numbers[file] = len(handles)
                    handles.append(opened)
        task_nbytes = _TASK_NBYTES if batch.memory is None else _DEVICE_TASK_NBYTES
        begun.lost = True
        try:
            for start, stop in good_runs(verdicts, begun.reached, last):
                if write and batch.hook:
                    batch.hook(start, stop)
                numbered = [numbers[file] for file in batch.files[start:stop]]
                pieces = describe(batch, start, stop, numbered, task_nbytes)
                futures: list[Any] = [_NOT_BEGUN] * len(pieces.pages)
                begun.runs.append((pieces, futures, stop))
                self._start(pieces, handles, batch.memory, futures, write=write)
                begun.reached = stop
        except Exception as error:  # noqa: BLE001 - what was begun is waited for all the same
            _LOG.error("kvikio was not given all pages", exc_info=error)
            begun.refusal = f"engine_error: {type(error).__name__}: {error}"
        begun.lost = False

    @staticmethod
    def _start(
        pieces: Descriptors,
        handles: list[Any],
        memory: DeviceMemory | None,
        futures: list[Any],
        *,
        write: bool,
    ) -> None:
        """Hand all pieces on; put down their futures, or what was raised instead of one."""
        bytes_at = _host_bytes if memory is None else DeviceBytes
        calls = [handle.pwrite if write else handle.pread for handle in handles]
        for at, ((address, nbytes, _), (offset, _, number)) in enumerate(
            zip(pieces.memory.tolist(), pieces.files.tolist(), strict=True)
        ):
            try:
                futures[at] = calls[number](bytes_at(address, nbytes), file_offset=offset)
            except Exception as error:  # noqa: BLE001 - it becomes a retry of these pages
                futures[at] = error

    def _finish(
        self,
        batch: PageBatch,
        pieces: Descriptors,
        futures: list[Any],
        last: int,
        verdicts: list[str],
        *,
        write: bool,
    ) -> dict[int, str]:
        """See how pieces ended; return the pages that have to be tried again, and why."""
        again: dict[int, str] = {}
        first = int(pieces.pages[0])
        ends = [*pieces.pages[1:].tolist(), last]
        for future, nbytes, page, end in zip(
            futures, pieces.memory[:, 1].tolist(), pieces.pages.tolist(), ends, strict=True
        ):
            outcome = _outcome(future, nbytes)
            if not outcome:
                continue
            touched = range(page, max(page + 1, end))
            if outcome == "timeout":
                reason = f"timeout: no end after {self._deadline_s:.0f} s"
                verdicts[touched.start : touched.stop] = [reason] * len(touched)
            else:
                _LOG.debug("kvikio: %s", outcome)
                again |= dict.fromkeys(touched, outcome)
        again = {page: why for page, why in again.items() if not verdicts[page]}
        if batch.hook and not write:
            for page in range(first, last):
                if not verdicts[page] and page not in again:
                    batch.hook(page, page + 1)
        return again


@dataclass(slots=True)
class _Begun:
    """What of some pages was handed to kvikio.

    Attributes
    ----------
    reached : int
        Page behind the last that was; where not all could be, `refusal` is why.
    runs : list of (pieces, futures, page behind the last)
    lost : bool
        Whether a call may have been made whose future nobody has.
    """

    reached: int
    refusal: str = ""
    runs: list[tuple[Descriptors, list[Any], int]] = field(default_factory=list)
    lost: bool = False

    def futures(self) -> list[Any]:
        """Return what stands for each piece: its future, or an exception."""
        return [future for _, futures, _ in self.runs for future in futures]


def _open_to_write(fd: int) -> Any:  # noqa: ANN401 - of the package
    return kvikio_module().CuFile(f"/proc/self/fd/{fd}", "r+")


def _open_to_read(fd: int) -> Any:  # noqa: ANN401 - of the package
    return kvikio_module().CuFile(f"/proc/self/fd/{fd}", "r")


def _handle(kept: Batch, file: StoreFile, *, write: bool) -> Any:  # noqa: ANN401 - of the package
    """Return an open handle, or the verdict on pages of a file that has none."""
    if write and not file.writable:
        return "access_denied"
    try:
        return kept.handle(file)
    except SlabDamagedError as damage:
        return f"damaged: {damage}"
    except OSError as failure:
        return open_reason(failure)
    except RuntimeError as failure:
        return f"io_error: {failure}"


def _host_bytes(address: int, nbytes: int) -> Any:  # noqa: ANN401 - an array
    raw: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(raw, np.uint8)


def _all_done(futures: list[Any], until: float) -> bool:
    """Whether all have ended, or have had their time; those that have are taken from the end of the list."""
    while futures and _done(futures[-1]):
        futures.pop()
    return not futures or time.monotonic() > until


def _done(future: Any) -> bool:  # noqa: ANN401 - of the package
    """Whether a piece is known to have ended."""
    try:
        return isinstance(future, Exception) or bool(future.done())
    except Exception:  # noqa: BLE001 - of the package: it is asked again as long as there is time
        _LOG.debug("kvikio does not tell how a transfer goes", exc_info=True)
        return False


def _outcome(future: Any, nbytes: int) -> str:  # noqa: ANN401 - of the package
    """Return "", `timeout`, or what went wrong with one piece."""
    if isinstance(future, Exception):
        return str(future) or type(future).__name__
    if not _done(future):
        return "timeout"
    try:
        moved = future.get()
    except Exception as error:  # noqa: BLE001 - the pages are tried once more
        return str(error) or type(error).__name__
    return "" if moved == nbytes else f"{moved} of {nbytes} bytes were moved"


def _register(memory: DeviceMemory) -> list[DeviceBytes]:
    """Register a ring with cuFile, which then need not copy through buffers of its own; a pool is too large.

    Where that fails kvikio moves the memory all the same.
    """
    if not memory.staging:
        return []
    try:
        buffer = importlib.import_module("kvikio.buffer")
        done = [DeviceBytes(*region) for region in memory.regions]
        for region in done:
            buffer.memory_register(region)
    except Exception as error:  # noqa: BLE001 - of the package
        _LOG.info("kvikio goes on without registered memory: %s", error)
        return []
    return done


def _deregister(regions: list[DeviceBytes]) -> None:
    for region in regions:
        importlib.import_module("kvikio.buffer").memory_deregister(region)
