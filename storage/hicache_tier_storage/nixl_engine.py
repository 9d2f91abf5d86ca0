"""Byte engine `nixl`: NIXL's POSIX plug-in with kernel AIO or io_uring, and GDS_MT for GPU memory.

Lanes (agents) for reads and for writes are apart, and each is used by one thread at a time, so that put and
get never share an agent. What NIXL cannot move well goes by `posix`: memory that O_DIRECT does not take,
pages in many small pieces (it has no vectored I/O), and the pages of a transfer that failed, one by one, for
a verdict on each.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.errors import not_known

from .descriptors import MAX_DESCRIPTORS, describe, file_groups, good_runs, hull, parts
from .flights import PartByPart, Settled
from .nixl_device import DeviceMove, close_files
from .nixl_lane import QUEUES, LaneError, LaneTimeoutError, NixlLane, gpu_plugin, posix_plugin
from .nixl_package import nixl_module
from .posix import PosixEngine, default_threads, open_reason
from .retry import retry
from .shared_work import SharedWork
from .slab import SlabDamagedError
from .vectors import DIRECT_ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from .engine import PageBatch
    from .slab import StoreFile

_LOG = logging.getLogger(__name__)
_ENGINES: weakref.WeakSet[NixlEngine] = weakref.WeakSet()
_FILES_AT_ONCE = 8
_DEADLINE_S = 60.0
_MIN_PIECE_NBYTES = 4096


class NixlEngine:
    """Host pages to files and back through NIXL.

    Parameters
    ----------
    direct : bool
        Use O_DIRECT; where the medium refuses it at run time the engine goes on with buffered I/O.
    queue : str
        `aio` or `io_uring`.
    threads : int, optional
        Lanes in each direction, each with a thread while it is used; and at least as many of GDS_MT.
    deadline_s : float
        Longest wait for one transfer (32 MiB at most). Past it, its pages get the verdict `timeout`: the
        kernel may still move their bytes.
    min_piece_nbytes : int
        Pages whose pieces are smaller on average go by vectored `posix` calls.

    Attributes
    ----------
    device_mode : str
        Plug-in for GPU memory, as the probe finds it; "" where pages in GPU memory are refused.
    retried_pages : int
        Pages that were moved one by one because their transfer failed.

    Raises
    ------
    EngineUnavailableError
        Where NIXL cannot be imported.
    """

    name = "nixl"

    def __init__(
        self,
        *,
        direct: bool,
        queue: str = "aio",
        threads: int | None = None,
        deadline_s: float = _DEADLINE_S,
        min_piece_nbytes: int = _MIN_PIECE_NBYTES,
    ) -> None:
        if queue not in QUEUES:
            raise not_known("queue", queue, QUEUES)
        nixl_module()
        self._posix = posix_plugin(queue)
        self._queue = queue
        self._threads = max(1, threads or default_threads())
        self._gpu_threads = max(
            self._threads, (os.cpu_count() or 1) // 2
        )  # the plug-in's own choice at least
        self._plain = PosixEngine(direct=direct, threads=self._threads)
        self._pool = ThreadPoolExecutor(max(1, self._threads - 1), thread_name_prefix="hct-nixl")
        self._deadline_s = deadline_s
        self._min_piece_nbytes = min_piece_nbytes
        self._lock = threading.Lock()
        self._idle: dict[bool, list[NixlLane]] = {True: [], False: []}  # by "for writing"
        self._lanes: weakref.WeakSet[NixlLane] = weakref.WeakSet()
        self._closed = ""
        self.device_mode = ""
        self.retried_pages = 0
        _ENGINES.add(self)

    @property
    def mode(self) -> str:
        """Plug-in, queue, and `direct` or `buffered`."""
        return f"POSIX {self._queue}, {self._plain.mode}"

    def write(self, batch: PageBatch) -> list[str]:
        """Write every page; "" or a reason for each."""
        return self._move(batch, write=True)

    def read(self, batch: PageBatch) -> list[str]:
        """Read every page; "" or a reason for each."""
        return self._move(batch, write=False)

    def close(self) -> None:
        """Stop the threads, destroy the agents."""
        with self._lock:
            self._closed = self._closed or "the engine is closed"
            lanes = [lane for idle in self._idle.values() for lane in idle]
            self._idle = {True: [], False: []}
        self._pool.shutdown(wait=False, cancel_futures=True)
        for lane in lanes:
            lane.close()
        if self.device_mode:
            close_files()
        self._plain.close()

    # -- lanes -----------------------------------------------------------------------------------------

    def take_lane(self, *, write: bool) -> NixlLane:
        """Lend a lane to the calling thread."""
        with self._lock:
            idle = self._idle[write]
            if idle:
                return idle.pop()
        try:
            lane = NixlLane(self._posix, self._deadline_s)
        except Exception as error:
            raise LaneError(f"no agent: {error}") from error
        self._lanes.add(lane)
        return lane

    def return_lane(self, lane: NixlLane, *, write: bool) -> None:
        """Take a lane back; one that cannot be used any more, or is one too many, is closed."""
        with self._lock:
            keep = lane.usable and not self._closed and len(self._idle[write]) < self._threads
            if keep:
                self._idle[write].append(lane)
        if not keep:
            lane.close()

    def leak_lanes(self) -> None:
        """Let a child of fork use nothing of its parent's, and destroy nothing of it either."""
        self._closed = "the engine was made by another process"
        self._lock = threading.Lock()
        for lane in list(self._lanes):
            lane.leak()
        self._idle = {True: [], False: []}

    # -- moving ----------------------------------------------------------------------------------------

    def _move(self, batch: PageBatch, *, write: bool) -> list[str]:
        count = len(batch)
        if self._closed:
            return [f"engine_error: {self._closed}"] * count
        if not count:
            return []
        if batch.memory is not None:
            return self.start(batch, write=write).run()
        if not self._suits(batch):
            return self._plain.write(batch) if write else self._plain.read(batch)
        move = _Move(self, batch, write=write)
        for first, last in file_groups(batch.files, _FILES_AT_ONCE):
            with ExitStack() as opened:
                move.open(first, last, opened, direct=self._plain.mode == "direct")
                cut = list(parts(batch, first, last, self._threads))
                shared = SharedWork(move.work, cut)
                try:
                    for _ in range(min(self._threads, len(cut)) - 1):
                        self._pool.submit(shared.help)
                    move.work(shared.parts)
                finally:
                    shared.end()  # each wait inside has a deadline
                if shared.failure is not None:
                    raise shared.failure
        if move.failed:
            self.retried_pages += len(move.failed)
            _LOG.info("%d pages of a NIXL transfer are tried one by one", len(move.failed))
            retry(self._plain, batch, sorted(move.failed), move.verdicts, write=write)
        return move.verdicts

    def start(self, batch: PageBatch, *, write: bool) -> PartByPart | Settled:
        """Begin to move pages in GPU memory; the plug-in has threads of its own."""
        if self._closed:
            return Settled([f"engine_error: {self._closed}"] * len(batch))
        if not self.device_mode:
            return Settled(["engine_error: no plug-in for GPU memory was found to work"] * len(batch))
        plugin, direct = gpu_plugin(self.device_mode, self._gpu_threads), self._plain.mode == "direct"
        move = DeviceMove(batch, plugin, self._deadline_s, direct=direct, write=write)
        return PartByPart(move.verdicts, self._device_parts(move))

    def _device_parts(self, move: DeviceMove) -> Generator[Callable[[], bool], None, None]:
        yield from move.work()
        self.retried_pages += move.retried

    def _suits(self, batch: PageBatch) -> bool:
        """Whether NIXL moves this memory as it is, and well."""
        pieces = batch.addresses.shape[1]
        if pieces > MAX_DESCRIPTORS or batch.page_nbytes < pieces * self._min_piece_nbytes:
            return False
        if self._plain.mode != "direct":
            return True
        bits = int(np.bitwise_or.reduce(batch.addresses, axis=None) | np.bitwise_or.reduce(batch.nbytes))
        return not bits % DIRECT_ALIGNMENT


class _Move:
    """One batch on its way."""

    def __init__(self, engine: NixlEngine, batch: PageBatch, *, write: bool) -> None:
        self._engine, self._batch, self._write = engine, batch, write
        self._low, self._high = hull(batch)
        self._fds: dict[StoreFile, int] = {}
        self.verdicts = [""] * len(batch)
        self.failed: set[int] = set()

    def open(self, first: int, last: int, opened: ExitStack, *, direct: bool) -> None:
        """Open the files of these pages; pages of a file that cannot be opened get their verdict here."""
        self._fds = {}
        refused: dict[StoreFile, str] = {}
        for at in range(first, last):
            file = self._batch.files[at]
            if file not in self._fds and file not in refused:
                try:
                    self._fds[file] = opened.enter_context(file.open(direct=direct))
                except SlabDamagedError as damage:
                    refused[file] = f"damaged: {damage}"
                except OSError as failure:
                    refused[file] = open_reason(failure)
            self.verdicts[at] = refused.get(file, "")

    def work(self, cut: Iterator[tuple[int, int]]) -> None:
        """Move parts until there are no more; several threads share the iterator."""
        lane = None
        hook = self._batch.hook
        try:
            for first, last in cut:
                for start, stop in good_runs(self.verdicts, first, last):
                    if self._write and hook:
                        hook(start, stop)
                    try:
                        if lane is None or not lane.usable:
                            lane = self._engine.take_lane(write=self._write)
                        self._transfer(lane, start, stop)
                    except LaneTimeoutError as late:
                        self.verdicts[start:stop] = [f"timeout: {late}"] * (stop - start)
                    except LaneError as error:
                        _LOG.debug("NIXL: %s", error)
                        self.failed.update(range(start, stop))
                    else:
                        if not self._write and hook:
                            hook(start, stop)
        finally:
            if lane is not None:
                self._engine.return_lane(lane, write=self._write)

    def _transfer(self, lane: NixlLane, first: int, last: int) -> None:
        files = self._batch.files[first:last]
        fds = [self._fds[file] for file in files]
        lane.cover(self._low, self._high)
        lengths = {self._fds[file]: file.nbytes for file in set(files)}
        lane.transfer(describe(self._batch, first, last, fds), lengths, write=self._write)


def _leak_in_child() -> None:
    for engine in list(_ENGINES):
        engine.leak_lanes()


os.register_at_fork(after_in_child=_leak_in_child)
