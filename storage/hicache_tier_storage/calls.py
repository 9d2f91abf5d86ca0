"""Calls of storage with a deadline: a call that hangs costs a thread, and not the caller."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG = logging.getLogger(__name__)
_IDLE_S = 60.0  # an idle thread ends after this long
_POLL_S = 0.002


class Call:
    """One call on its way.

    Attributes
    ----------
    error : BaseException or None
        What it raised.
    result
        What it returned.
    started_s : float
        On the monotonic clock.
    """

    __slots__ = ("_gate", "_late", "_lock", "_returned", "_work", "error", "result", "started_s")

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._gate = threading.Lock()  # says nothing: a signal may raise as a wait has taken it
        self._gate.acquire()
        self._lock = threading.Lock()
        self._returned = False
        self._late: Callable[[], object] | None = None
        self.error: BaseException | None = None
        self.result: Any = None
        self.started_s = time.monotonic()

    def run(self) -> None:
        """Do it; on a thread of its lane."""
        try:
            self.result = self._work()
        except BaseException as error:  # noqa: BLE001 - a store may raise anything; the caller looks
            self.error = error
        finally:
            del self._work
            with self._lock:
                self._returned = True
                late = self._late
            self._gate.release()
            if late is not None:
                late()

    def wait(self, until_s: float) -> bool:
        """Wait until a time on the monotonic clock; say whether the call has returned."""
        if not self._returned and self._gate.acquire(timeout=max(0.0, until_s - time.monotonic())):
            self._gate.release()
        return self._returned

    def outcome(self) -> Any:  # noqa: ANN401 - whatever the work returns
        """Return what it returned, or raise what it raised; after a `wait` that was in time."""
        if self.error is not None:
            raise self.error
        return self.result

    def leave(self, late: Callable[[], object]) -> None:
        """Wait no more; `late` is called when the call returns, at once where it just has."""
        with self._lock:
            if not self._returned:
                self._late = late
                return
        late()


class Lane:
    """Threads for calls of one kind, as many as are needed up to a bound.

    Parameters
    ----------
    name : str
        Threads bear it after `hct-`.
    most_threads : int
        Calls under way, hung ones included; beyond that calls are refused.
    """

    def __init__(self, name: str, most_threads: int) -> None:
        self.name = name
        self._most = most_threads
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._threads = 0
        self._busy = 0
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Calls that have not returned, hung ones included."""
        return self._busy

    @property
    def full(self) -> bool:
        """Whether all threads that there may be are taken."""
        return self._busy >= self._most

    def start(self, work: Callable[[], Any]) -> Call | None:
        """Begin a call; None where every thread is taken, or none can be started."""
        call = Call(work)
        with self._lock:
            if self._closed or self._busy >= self._most:
                return None
            if self._busy >= self._threads and not self._start_thread():
                return None
            self._busy += 1
            self._queue.put(call)  # with no call in between, where a signal could raise
        return call

    def close(self) -> None:
        """Refuse calls from now on, and let threads end as they become idle."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._queue.put(None)

    def drain(self, until_s: float) -> bool:
        """Wait for the calls under way until a time on the monotonic clock; say whether all returned."""
        while self._busy and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return not self._busy

    def join(self, until_s: float) -> bool:
        """Wait after a `close` for the threads that no call holds; say whether all ended."""
        while self._threads > self._busy and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return not self._threads

    def _start_thread(self) -> bool:
        thread = threading.Thread(target=self._loop, name=f"hct-{self.name}", daemon=True)
        self._threads += 1
        try:
            thread.start()
        except RuntimeError as error:
            self._threads -= 1
            _LOG.warning("no thread for %s can be started: %s", self.name, error)
            return False
        return True

    def _loop(self) -> None:
        while True:
            try:
                call = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._busy < self._threads:  # no call was put for this thread meanwhile
                        self._threads -= 1
                        return
                continue
            if call is None:
                with self._lock:
                    self._threads -= 1
                return
            call.run()
            del call
            with self._lock:
                self._busy -= 1
