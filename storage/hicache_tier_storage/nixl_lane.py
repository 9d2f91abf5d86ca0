"""One lane to the disk through NIXL: an agent with one backend, used by one thread at a time."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .cufile_library import preload_cufile
from .descriptors import MAX_DESCRIPTORS
from .engine import STILL_UNDER_WAY
from .flights import wait_through, wait_until
from .nixl_package import nixl_module
from .pace import Pace
from .registrations import Registrations

if TYPE_CHECKING:
    from .descriptors import Descriptors
    from .engine import DeviceMemory

_LOG = logging.getLogger(__name__)
QUEUES = ("aio", "io_uring")  # POSIX AIO fails later transfers after one error
GPU_PLUGINS = ("GDS_MT", "GDS")
_KERNEL_QUEUE = 256
_SUBMITTED_A_POLL = 64  # the plug-in hands that many to the kernel each time it is asked how it goes
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plug-in of NIXL as a lane uses it.

    Attributes
    ----------
    name : str
    memory : str
        `DRAM` or `VRAM`.
    parameters : tuple of (str, str)
    submits_when_asked : bool
        Whether I/O is handed on only as it is asked how a transfer goes.
    """

    name: str
    memory: str
    parameters: tuple[tuple[str, str], ...] = ()
    submits_when_asked: bool = False


def posix_plugin(queue: str) -> Plugin:
    """Return the POSIX plug-in with one of `QUEUES`."""
    switch = {"aio": "use_aio", "io_uring": "use_uring"}[queue]
    sizes = (("ios_pool_size", str(MAX_DESCRIPTORS)), ("kernel_queue_size", str(_KERNEL_QUEUE)))
    return Plugin("POSIX", "DRAM", ((switch, "true"), *sizes), submits_when_asked=True)


def gpu_plugin(name: str, threads: int = 0) -> Plugin:
    """Return one of `GPU_PLUGINS`; `GDS_MT` with so many threads, or half as many as there are cores."""
    count = (("thread_count", str(threads)),) if threads and name == "GDS_MT" else ()
    return Plugin(name, "VRAM", count)


class LaneError(Exception):
    """A transfer failed; nothing of it is under way any more."""


class LaneTimeoutError(Exception):
    """A transfer did not end in time; the kernel may still move its bytes. Its lane is not used again."""


class NixlLane:
    """An agent of its own with one plug-in. Transfers of several threads take turns at its calls.

    Parameters
    ----------
    plugin : Plugin
    deadline_s : float
        Longest wait for one transfer.
    """

    def __init__(self, plugin: Plugin, deadline_s: float) -> None:
        nixl = nixl_module()
        if plugin.memory == "VRAM":
            preload_cufile()
        self.plugin = plugin
        self._name = f"hct-{os.getpid()}-{next(_NUMBERS)}"
        self._deadline_s = deadline_s
        settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl.nixl_agent(self._name, settings)
        self._agent.create_backend(plugin.name, dict(plugin.parameters))
        self._backends = [plugin.name]
        self._turn = threading.Lock()
        self._regions = Registrations(self._register, self._deregister)
        self._memory: Any = None
        self._low = self._high = 0
        self._under_way: set[Posted] = set()
        self._paces = {True: Pace(), False: Pace()}  # by "for writing"
        self.usable = True

    def ended(self, posted: Posted) -> None:
        """Take note that a transfer has ended."""
        self._under_way.discard(posted)

    def retire(self) -> bool:
        """Close a lane that cannot be used any more; False where it can, or something of it is under way."""
        with self._turn:
            if self.usable or self._under_way:
                return False
            self.close()
            return True

    def cover(self, low: int, high: int) -> None:
        """Have memory registered: one region, the hull of all that the lane was ever given.

        The plug-in keeps nothing of memory, so a hull that spans more than the pools costs nothing, and
        a pool is registered once and not a batch.

        Raises
        ------
        LaneError
        """
        if self._memory is not None:
            if self._low <= low and high <= self._high:
                return
            low, high = min(low, self._low), max(high, self._high)
        old, self._memory = self._memory, None
        try:
            if old is not None:
                self._agent.deregister_memory(old, self._backends)
            rows = [(low, high - low, 0, "")]
            self._memory = self._agent.register_memory(rows, self.plugin.memory, self._backends)
        except Exception as error:
            self.usable = False
            raise LaneError(f"memory was not registered: {error}") from error
        self._low, self._high = low, high

    def cover_device(self, memory: DeviceMemory) -> None:
        """Have memory of a device registered, once an owner.

        Raises
        ------
        LaneError
        """
        try:
            self._regions.cover(memory)
        except Exception as error:
            raise LaneError(f"memory of the device was not registered: {error}") from error

    def _register(self, memory: DeviceMemory) -> Any:  # noqa: ANN401 - of the package
        rows = [(address, nbytes, memory.device, "") for address, nbytes in memory.regions]
        with self._turn:
            return self._agent.register_memory(rows, self.plugin.memory, self._backends)

    def _deregister(self, registered: object) -> None:
        self._agent.deregister_memory(registered, self._backends)

    def register_file(self, fd: int, nbytes: int) -> Any:  # noqa: ANN401 - of the package
        """Register a file for all transfers until `deregister`; raises what the package raises."""
        with self._turn:
            return self._agent.register_memory([(0, nbytes, fd, "")], "FILE", self._backends)

    def deregister(self, registered: object) -> None:
        """Undo `register_file`; nothing where the lane cannot be used any more."""
        if self.usable:
            self._give_back(partial(self._deregister, registered))

    def transfer(self, pieces: Descriptors, files: dict[int, int], *, write: bool) -> None:
        """Move all pieces and wait for them; parameters and errors as of `post` and `Posted.finish`.

        Asking costs the processor 30 us each time, so nobody asks before most of the time has gone that the
        last transfers took for as many bytes, unless asking is what hands the rest to the kernel.
        """
        nbytes, pace = int(pieces.memory[:, 1].sum()), self._paces[write]
        paced = len(pieces.memory) <= _KERNEL_QUEUE
        nap_s = pace.nap_s(nbytes) if paced else 0.0
        began_s, overslept = time.monotonic(), False
        posted = self.post(pieces, files, write=write)
        try:
            left_s = began_s + nap_s - time.monotonic()
            if left_s > 0:  # not so for buffered I/O: `post` took all the time
                time.sleep(left_s)
                overslept = posted.ended()
            wait_until(posted.ended, began_s)
        except BaseException as interrupt:
            posted.stop(interrupt)
            raise
        posted.finish()
        if paced:
            pace.learn(nbytes, time.monotonic() - began_s, overslept=overslept)

    def post(self, pieces: Descriptors, files: dict[int, int], *, write: bool) -> Posted:
        """Begin to move all pieces.

        Parameters
        ----------
        pieces : Descriptors
            Their memory must be covered.
        files : dict of int to int
            Length of each open file by its descriptor, those apart that `register_file` was told of. They are
            registered for this transfer alone (10 us each with the POSIX plug-in): a number that the kernel
            gives to another file later never finds an old registration.
        write : bool

        Raises
        ------
        LaneError
        """
        posted = Posted(self, self._deadline_s)
        with self._turn:
            agent = self._agent
            if agent is None:
                raise LaneError("the agent was closed")
            self._under_way.add(posted)
        try:
            rows = [(0, nbytes, fd, "") for fd, nbytes in files.items()]
            with self._turn:
                if rows:
                    posted.registered = agent.register_memory(rows, "FILE", self._backends)
                posted.handle = agent.initialize_xfer(
                    "WRITE" if write else "READ",
                    agent.get_xfer_descs(pieces.memory, self.plugin.memory),
                    agent.get_xfer_descs(pieces.files, "FILE"),
                    self._name,
                    backends=self._backends,
                )
                posted.state = agent.transfer(posted.handle)
            if self.plugin.submits_when_asked:  # ask until all is with the kernel
                for _ in range(-(-min(len(pieces.memory), _KERNEL_QUEUE) // _SUBMITTED_A_POLL)):
                    posted.ended()
        except Exception as error:
            # Nothing was handed on; but what a queue of the POSIX plug-in holds is not known any more.
            self.usable = self.usable and not self.plugin.submits_when_asked
            posted.give_back()
            raise LaneError(f"{type(error).__name__}: {error}") from error
        except BaseException as interrupt:
            posted.stop(interrupt)
            raise
        return posted

    def ask(self, handle: object) -> str:
        """Return how a transfer goes: `PROC`, `DONE`; raises what the package raises."""
        with self._turn:
            return str(self._agent.check_xfer_state(handle))

    def release(self, handle: Any, registered: object) -> None:  # noqa: ANN401 - of the package
        """Give back what a transfer that has ended holds."""
        if handle is not None:
            self._give_back(handle.release)
        if registered is not None:
            self._give_back(partial(self._deregister, registered))

    def _give_back(self, release: Any) -> None:  # noqa: ANN401 - a callable of the package
        try:
            with self._turn:
                release()
        except Exception:  # noqa: BLE001 - nothing in the package names what it raises
            self.usable = False
            _LOG.warning("NIXL did not take a handle back", exc_info=True)

    def leak(self) -> None:
        """Never destroy the agent, nor use it.

        Its destructor would wait for I/O that does not come back, or for threads that a child of fork does
        not have.
        """
        self.usable = False
        self._regions.leak()
        _leak(self._agent)

    def close(self) -> None:
        """Give memory and agent back."""
        if self._agent is None:
            return
        if self.usable:
            self._regions.close()
            if self._memory is not None:
                self._give_back(partial(self._deregister, self._memory))
        self._regions.leak()
        self._memory = self._agent = None
        self.usable = False


class Posted:
    """A transfer under way.

    Attributes
    ----------
    state : str
        As NIXL says: `PROC` while it is under way, `DONE` at the end.
    """

    def __init__(self, lane: NixlLane, deadline_s: float) -> None:
        self._lane, self._deadline_s = lane, deadline_s
        self._until = time.monotonic() + deadline_s
        self._why = "the transfer was refused"
        self.handle: Any = None
        self.registered: Any = None
        self.state = ""

    def ended(self) -> bool:
        """Ask how it goes; True once it has ended, and where it has not in time."""
        if self.state == "PROC":
            try:
                self.state = self._lane.ask(self.handle)
            except Exception as error:  # noqa: BLE001 - the plug-in says so once all its I/O has come back
                self.state, self._why = "ERR", str(error)
        return self.state != "PROC" or time.monotonic() > self._until

    def finish(self) -> None:
        """Give back what it holds.

        Raises
        ------
        LaneError, LaneTimeoutError
        """
        if self.state == "PROC":
            self.leave()
            raise LaneTimeoutError(f"no end after {self._deadline_s:.0f} s")
        self.give_back()
        if self.state != "DONE":
            raise LaneError(self._why)

    def give_back(self) -> None:
        """Let NIXL have back what it gave for this transfer."""
        handle, self.handle = self.handle, None
        registered, self.registered = self.registered, None
        self._lane.release(handle, registered)
        self._lane.ended(self)

    def stop(self, interrupt: BaseException) -> None:
        """Wait for its end, through further interrupts; where there is none the interrupt says so."""
        wait_through(self.ended)
        if self.state not in {"", "PROC"}:
            self.give_back()
            return
        self.leave()  # without a state too: it may have been begun
        interrupt.add_note(STILL_UNDER_WAY)

    def leave(self) -> None:
        """Never touch it again, nor its lane: its bytes may still be under way."""
        _leak(self.handle)
        self._lane.leak()


def _leak(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
