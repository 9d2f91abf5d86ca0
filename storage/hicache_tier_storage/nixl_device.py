"""Pages in GPU memory through NIXL: an agent for each ring or pool, which has its memory registered once.

cuFile registers memory with a process, not with an agent, so memory must not be known to two agents.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import threading
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from .descriptors import describe, file_groups, good_runs, parts
from .nixl_lane import LaneError, LaneTimeoutError, NixlLane
from .posix import open_reason
from .slab import SlabDamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .engine import DeviceMemory, PageBatch
    from .nixl_lane import Plugin
    from .slab import StoreFile

_LOG = logging.getLogger(__name__)
_FILES_AT_ONCE = 8
_TASK_NBYTES = 4 << 20  # of one call of cuFile; the plug-in's threads share them


class _Lanes:
    """Lanes of this process by the owner of the memory that they have registered."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an owner may go while this thread makes another's lane
        self._known: dict[tuple[int, str], NixlLane] = {}

    def of(self, memory: DeviceMemory, plugin: Plugin, deadline_s: float) -> NixlLane:
        """Return the lane of a memory's owner; raises `LaneError` where none can be made."""
        key = (id(memory.owner), plugin.name)
        with self._lock:
            lane = self._known.get(key)
            if lane is None:
                try:
                    lane = NixlLane(plugin, deadline_s)
                except Exception as error:
                    raise LaneError(f"no agent: {error}") from error
                self._known[key] = lane
                weakref.finalize(memory.owner, self._drop, key).atexit = False
        if not lane.usable:
            raise LaneError("an earlier transfer of this memory did not end")
        lane.cover_device(memory)
        return lane

    def _drop(self, key: tuple[int, str]) -> None:
        with self._lock:
            lane = self._known.pop(key, None)
        if lane is not None:
            lane.close()

    def leak(self) -> None:
        """Never destroy an agent: at the end of the process, or in a child of fork, that may hang."""
        for lane in self._known.values():
            lane.leak()
        self._known = {}
        self._lock = threading.RLock()


_LANES = _Lanes()
atexit.register(_LANES.leak)
os.register_at_fork(after_in_child=_LANES.leak)


class DeviceMove:
    """One batch of pages in GPU memory on its way.

    Parameters
    ----------
    batch : PageBatch
    plugin : Plugin
    deadline_s : float
        Longest wait for one transfer.
    direct, write : bool

    Attributes
    ----------
    retried : int
        Pages that were moved one by one because their transfer failed.
    """

    def __init__(
        self, batch: PageBatch, plugin: Plugin, deadline_s: float, *, direct: bool, write: bool
    ) -> None:
        self._batch, self._plugin, self._deadline_s = batch, plugin, deadline_s
        self._direct, self._write = direct, write
        self._fds: dict[StoreFile, int] = {}
        self._verdicts = [""] * len(batch)
        self.retried = 0

    def run(self) -> list[str]:
        """Move every page; "" or a reason for each."""
        batch = self._batch
        for first, last in file_groups(batch.files, _FILES_AT_ONCE):
            with ExitStack() as opened:
                self._open(first, last, opened)
                failed: list[int] = []
                for start, stop in parts(batch, first, last, 1):
                    for begin, end in good_runs(self._verdicts, start, stop):
                        failed += self._try(begin, end)
                self.retried += len(failed)
                for page in failed:
                    self._try(page, page + 1, last_try=True)
                if any(reason.startswith("timeout") for reason in self._verdicts[first:last]):
                    opened.pop_all()  # what is under way still uses these descriptors
        return self._verdicts

    def _open(self, first: int, last: int, opened: ExitStack) -> None:
        """Open the files of these pages; pages of a file that cannot be opened get their verdict here."""
        self._fds = {}
        refused: dict[StoreFile, str] = {}
        for at in range(first, last):
            file = self._batch.files[at]
            if file not in self._fds and file not in refused:
                try:
                    fd = opened.enter_context(file.open(direct=self._direct))
                    self._fds[file] = opened.enter_context(_reopened(fd))
                except SlabDamagedError as damage:
                    refused[file] = f"damaged: {damage}"
                except OSError as failure:
                    refused[file] = open_reason(failure)
                else:
                    if self._write and not file.writable:
                        refused[file] = "access_denied"
            self._verdicts[at] = refused.get(file, "")

    def _try(self, first: int, last: int, *, last_try: bool = False) -> list[int]:
        """Move some pages; return those that have to be tried again."""
        batch, hook = self._batch, self._batch.hook
        if self._write and hook and not last_try:
            hook(first, last)
        try:
            self._transfer(first, last)
        except LaneTimeoutError as late:
            self._verdicts[first:last] = [f"timeout: {late}"] * (last - first)
        except LaneError as error:
            _LOG.debug("NIXL: %s", error)
            if not last_try:
                return list(range(first, last))
            self._verdicts[first:last] = [f"io_error: {error}"] * (last - first)
        else:
            if not self._write and batch.hook:
                batch.hook(first, last)
        return []

    def _transfer(self, first: int, last: int) -> None:
        batch = self._batch
        if batch.memory is None:
            raise LaneError("the pages are not on a device")
        files = batch.files[first:last]
        pieces = describe(batch, first, last, [self._fds[file] for file in files], _TASK_NBYTES)
        lane = _LANES.of(batch.memory, self._plugin, self._deadline_s)
        lane.transfer(pieces, {self._fds[file]: file.nbytes for file in set(files)}, write=self._write)


@contextmanager
def _reopened(fd: int) -> Iterator[int]:
    """Open the same file anew without O_NOFOLLOW, which cuFile refuses (it was obeyed already)."""
    kept = os.O_ACCMODE | os.O_DIRECT
    again = os.open(f"/proc/self/fd/{fd}", fcntl.fcntl(fd, fcntl.F_GETFL) & kept | os.O_CLOEXEC)
    try:
        yield again
    finally:
        os.close(again)
