"""Threads for I/O that a process does not wait for when it ends: one of them may hang in a call for good."""

from __future__ import annotations

import queue
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class DaemonPool:
    """What is needed of a `ThreadPoolExecutor`, which would be waited for at the end of the process.

    Parameters
    ----------
    most : int
        Threads, started as they are needed.
    name : str
        They bear it.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._queue: queue.SimpleQueue[Callable[[bool], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Semaphore(0)
        self._threads = 0
        self._closed = False
        weakref.finalize(self, _end, self._queue, most).atexit = False  # one that is forgotten

    def submit(self, work: Callable[..., _T], *arguments: object) -> Future[_T]:
        """Have a thread do something.

        Raises
        ------
        RuntimeError
            Where it is closed, or no thread can be started; then a thread that is there may yet do it.
        """
        future: Future[_T] = Future()

        def task(go: bool) -> None:
            if not (go and future.set_running_or_notify_cancel()):
                future.cancel()
                return
            try:
                future.set_result(work(*arguments))
            except BaseException as error:  # noqa: BLE001 - for whoever waits
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise RuntimeError("the threads were told to end")
            self._queue.put(task)
            if not self._idle.acquire(blocking=False) and self._threads < self._most:
                self._start_thread()
        return future

    def shutdown(self) -> None:
        """Have threads end after what they are at; what waits is cancelled."""
        with self._lock:
            self._closed = True
            with suppress(queue.Empty):
                while True:
                    task = self._queue.get_nowait()
                    if task is not None:
                        task(False)
            for _ in range(self._threads):
                self._queue.put(None)

    def _start_thread(self) -> None:
        name = f"{self._name}_{self._threads}"
        threading.Thread(target=_work, args=(self._queue, self._idle), name=name, daemon=True).start()
        self._threads += 1


def _end(tasks: queue.SimpleQueue[Any], threads: int) -> None:
    for _ in range(threads):
        tasks.put(None)


def _work(tasks: queue.SimpleQueue[Any], idle: threading.Semaphore) -> None:
    """Do what comes; without a reference to the pool, so that one that is forgotten can go."""
    while True:
        try:
            task = tasks.get_nowait()
        except queue.Empty:
            idle.release()
            task = tasks.get()
        if task is None:
            return
        task(True)
        del task
