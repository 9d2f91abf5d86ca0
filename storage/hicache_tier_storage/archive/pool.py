"""Workers of an export or import: threads of this process, or processes."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POLITE = 5
_MOST_THREADS = 4


def default_threads() -> int:
    """Threads of a process that works alone."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _prepare(*, polite: bool, of_a_process: bool) -> None:
    """Make a worker step back behind a server that writes now, and leave Ctrl-C to the process in charge."""
    if polite:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _POLITE)  # on Linux: this thread's
    if of_a_process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


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
    """

    def __init__(self, processes: int, threads: int, *, polite: bool) -> None:
        self.count = threads if processes == 1 else processes
        self._stop = threading.Event()
        self._waiting: set[Future[Any]] = set()
        self._pool: Executor
        if processes == 1:
            self._pool = ThreadPoolExecutor(
                threads, "hct-archive", initializer=_prepare_thread, initargs=(polite,)
            )
        else:
            self._pool = ProcessPoolExecutor(
                processes, get_context("spawn"), initializer=_prepare_process, initargs=(polite,)
            )
        self.in_process = processes == 1

    def stopped(self) -> bool:
        """Whether calls under way should end early."""
        return self._stop.is_set()

    def submit(self, call: Callable[..., Any], *args: object) -> None:
        """Begin a call; in threads it may look at `stopped`."""
        self._waiting.add(self._pool.submit(call, *args))

    def __len__(self) -> int:
        return len(self._waiting)

    def results(self) -> Iterator[Any]:
        """Wait for at least one call; yield what those that have ended returned, or raise what they did."""
        done, self._waiting = wait(self._waiting, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _prepare_thread(polite: bool) -> None:
    _prepare(polite=polite, of_a_process=False)


def _prepare_process(polite: bool) -> None:
    _prepare(polite=polite, of_a_process=True)
