"""Pages in GPU memory through NIXL: an agent for each ring or pool, whose memory and slabs it knows for good.

cuFile registers memory with a process, not with an agent, so memory must not be known to two agents.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING

from .descriptors import describe, file_groups, good_runs, parts
from .kept_handles import KeptHandles
from .nixl_lane import LaneError, LaneTimeoutError, NixlLane
from .posix import open_reason
from .slab import SlabDamagedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from .engine import DeviceMemory, PageBatch
    from .kept_handles import Batch
    from .nixl_lane import Plugin
    from .slab import StoreFile

_LOG = logging.getLogger(__name__)
_FILES_AT_ONCE = 8
_FILES_KEPT = 4  # a ring, and there may be several rings
_TASK_NBYTES = 2 << 20  # of one call of cuFile: a ring has enough of them for all the plug-in's threads


class _File:
    """A slab opened anew without O_NOFOLLOW, which cuFile refuses (it was obeyed already), and registered."""

    def __init__(self, lane: NixlLane, fd: int) -> None:
        kept = os.O_ACCMODE | os.O_DIRECT
        flags = fcntl.fcntl(fd, fcntl.F_GETFL) & kept | os.O_CLOEXEC
        self._lane, self._fd = lane, os.open(f"/proc/self/fd/{fd}", flags)
        try:
            self._registered = lane.register_file(self._fd, os.fstat(self._fd).st_size)
        except BaseException:
            os.close(self._fd)
            raise

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def close(self) -> None:
        """Deregister the file and close it."""
        self._lane.deregister(self._registered)
        os.close(self._fd)


class _Side:
    """What NIXL has of one owner of memory: an agent, and the files that are registered with it."""

    def __init__(self, plugin: Plugin, deadline_s: float) -> None:
        self.lane = NixlLane(plugin, deadline_s)
        open_file = partial(_File, self.lane)
        self.files = {
            direct: KeptHandles(open_file, direct=direct, most=_FILES_KEPT) for direct in (False, True)
        }

    def close(self) -> None:
        """Close the files, then the agent."""
        for files in self.files.values():
            files.close()
        self.lane.close()


class _Sides:
    """The sides of this process, by the owner of the memory that they have registered."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an owner may go while this thread makes another's side
        self._known: dict[tuple[int, str], _Side] = {}

    def of(self, memory: DeviceMemory, plugin: Plugin, deadline_s: float) -> _Side:
        """Return the side of a memory's owner; raises `LaneError` where none can be made."""
        key = (id(memory.owner), plugin.name)
        with self._lock:
            side = self._known.get(key)
            if side is not None and side.lane.retire():
                self._drop(key)  # nothing of it is under way: another takes its place
                side = None
            if side is None:
                try:
                    side = _Side(plugin, deadline_s)
                except Exception as error:
                    raise LaneError(f"no agent: {error}") from error
                self._known[key] = side
                weakref.finalize(memory.owner, self._drop, key).atexit = False
        if not side.lane.usable:
            raise LaneError("an earlier transfer of this memory did not end")
        side.lane.cover_device(memory)
        return side

    def close_files(self) -> None:
        """Close all files that nobody uses now."""
        with self._lock:
            sides = list(self._known.values())
        for side in sides:
            for files in side.files.values():
                files.trim(0)

    def _drop(self, key: tuple[int, str]) -> None:
        with self._lock:
            side = self._known.pop(key, None)
        if side is not None:
            side.close()

    def leak(self) -> None:
        """Never destroy an agent: at the end of the process, or in a child of fork, that may hang."""
        for side in self._known.values():
            side.lane.leak()
        self._known = {}
        self._lock = threading.RLock()


_SIDES = _Sides()
atexit.register(_SIDES.leak)
os.register_at_fork(after_in_child=_SIDES.leak)


def close_files() -> None:
    """Close slabs that no batch uses now, so that those which were removed give their room back."""
    _SIDES.close_files()


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
    verdicts : list of str
        "" or a reason for each page, once the work is done.
    retried : int
        Pages that were moved one by one because their transfer failed.
    """

    def __init__(
        self, batch: PageBatch, plugin: Plugin, deadline_s: float, *, direct: bool, write: bool
    ) -> None:
        self._batch, self._plugin, self._deadline_s = batch, plugin, deadline_s
        self._direct, self._write = direct, write
        self._fds: dict[StoreFile, int] = {}
        self.verdicts = [""] * len(batch)
        self.retried = 0

    def work(self) -> Generator[Callable[[], bool], None, None]:
        """Move every page, transfer by transfer; yields what tells that one has ended."""
        batch = self._batch
        memory = batch.memory
        if memory is None:
            self.verdicts[:] = ["engine_error: the pages are not on a device"] * len(batch)
            return
        try:
            side = _SIDES.of(memory, self._plugin, self._deadline_s)
        except LaneError as error:
            self.verdicts[:] = [f"engine_error: {error}"] * len(batch)
            return
        for first, last in file_groups(batch.files, _FILES_AT_ONCE):
            with side.files[self._direct].batch() as kept:
                try:
                    self._open(kept, first, last)
                    failed: list[int] = []
                    for start, stop in parts(batch, first, last, 1):
                        for begin, end in good_runs(self.verdicts, start, stop):
                            failed += yield from self._try(side.lane, begin, end)
                    self.retried += len(failed)
                    for page in failed:
                        yield from self._try(side.lane, page, page + 1, last_try=True)
                except BaseException:
                    kept.forget()
                    raise
                if any(reason.startswith("timeout") for reason in self.verdicts[first:last]):
                    kept.forget()  # what is under way still uses these descriptors

    def _open(self, kept: Batch, first: int, last: int) -> None:
        """Open the files of these pages; pages of a file that cannot be opened get their verdict here."""
        found: dict[StoreFile, int | str] = {}
        for at in range(first, last):
            file = self._batch.files[at]
            if file not in found:
                found[file] = self._opened(kept, file)
            opened = found[file]
            self.verdicts[at] = opened if isinstance(opened, str) else ""
        self._fds = {file: opened for file, opened in found.items() if isinstance(opened, int)}

    def _opened(self, kept: Batch, file: StoreFile) -> int | str:
        """Return a descriptor that the agent knows, or the verdict on pages of a file that has none."""
        if self._write and not file.writable:
            return "access_denied"
        try:
            return int(kept.handle(file).fileno())
        except SlabDamagedError as damage:
            return f"damaged: {damage}"
        except OSError as failure:
            return open_reason(failure)
        except Exception as error:  # noqa: BLE001 - nothing in the package names what it raises
            return f"io_error: the file was not registered: {error}"

    def _try(
        self, lane: NixlLane, first: int, last: int, *, last_try: bool = False
    ) -> Generator[Callable[[], bool], None, list[int]]:
        """Move some pages; return those that have to be tried again."""
        batch, hook = self._batch, self._batch.hook
        if self._write and hook and not last_try:
            hook(first, last)
        try:
            fds = [self._fds[file] for file in batch.files[first:last]]
            posted = lane.post(describe(batch, first, last, fds, _TASK_NBYTES), {}, write=self._write)
            try:
                yield posted.ended
            except BaseException as interrupt:
                posted.stop(interrupt)
                raise
            posted.finish()
        except LaneTimeoutError as late:
            self.verdicts[first:last] = [f"timeout: {late}"] * (last - first)
        except LaneError as error:
            _LOG.debug("NIXL: %s", error)
            if not last_try:
                return list(range(first, last))
            self.verdicts[first:last] = [f"io_error: {error}"] * (last - first)
        else:
            if not self._write and batch.hook:
                batch.hook(first, last)
        return []
