"""Workers of an export or import: threads of this process, or processes."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING, Any, Self

from hicache_tier_storage.bounded import DeadlineError
from hicache_tier_storage.daemon_pool import DaemonPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POLITE = 5
_MOST_THREADS = 4


def default_threads() -> int:
    """Threads of a process that works alone."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _step_back(polite: bool) -> None:
    """Make a worker step back behind a server that writes now."""
    if polite:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _POLITE)  # on Linux: this thread's


def _prepare_process(polite: bool) -> None:
    """Have a process leave Ctrl-C to the one in charge, and end with it."""
    _step_back(polite)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one in charge is gone: what it would write is nobody's."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Workers:
    """A bounded number of calls under way; what they return comes back as they end.

    Parameters
    ----------
    processes : int
        1: threads of this process.
    threads : int
        How many, in this process; other processes work with one each.
    polite : bool
        Run at a lower priority than the rest of the machine.
    deadline_s : float, optional
        How long to wait for one of the calls under way to end.
    """

    def __init__(
        self, processes: int, threads: int, *, polite: bool, deadline_s: float | None = None
    ) -> None:
        self.count = threads if processes == 1 else processes
        self.in_process = processes == 1
        self._stop = threading.Event()
        self._waiting: set[Future[Any]] = set()
        self._polite, self._deadline_s = polite, deadline_s
        self._threads = DaemonPool(threads, "hct-archive")
        self._processes = (
            None
            if self.in_process
            else ProcessPoolExecutor(
                processes, get_context("spawn"), initializer=_prepare_process, initargs=(polite,)
            )
        )

    def stopped(self) -> bool:
        """Whether calls under way should end early."""
        return self._stop.is_set()

    def submit(self, call: Callable[..., Any], *args: object) -> None:
        """Begin a call; in threads it may look at `stopped`."""
        if self._processes is None:
            self._waiting.add(self._threads.submit(self._on_thread, call, *args))
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as processes that begin have it
        try:
            self._waiting.add(self._processes.submit(call, *args))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _on_thread(self, call: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 - what the call returns
        _step_back(self._polite)
        return call(*args)

    def __len__(self) -> int:
        return len(self._waiting)

    def results(self) -> Iterator[Any]:
        """Wait for at least one call; yield what those that have ended returned, or raise what they did.

        Raises
        ------
        DeadlineError
            Where none ends in time.
        """
        done, self._waiting = wait(self._waiting, self._deadline_s, FIRST_COMPLETED)
        if not done:
            raise DeadlineError(f"Storage did not answer within {self._deadline_s:g} s.")
        for future in done:
            yield future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stop.set()
        self._threads.shutdown()
        if self._processes is not None:
            self._processes.shutdown(wait=True, cancel_futures=True)
        elif not (kind and issubclass(kind, DeadlineError)):
            wait([future for future in self._waiting if not future.cancelled()], self._deadline_s)
