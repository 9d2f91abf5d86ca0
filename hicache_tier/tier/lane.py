"""Threads that call the store, one direction each, and survive what the store does."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .breaker import Breaker
from .store import error_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from .core import Core


class Job(Protocol):
    """One call of the store and what follows from it."""

    def run(self) -> object:
        """Call the store; on the lane's thread, without the tier's lock."""

    def finish(self, answer: object, error: BaseException | None) -> None:
        """Take the answer, or what was raised instead; with the lock, also when the deadline was missed."""

    def expire(self) -> None:
        """Give up what the call stood for: it missed its deadline; with the lock. `finish` may yet come."""


@dataclass(slots=True, eq=False)
class Call:
    """A job that is with the store."""

    job: Job
    started_s: float
    late: bool = False


class Lane:
    """One thread that takes jobs when it is free; a hung call costs the thread, not the lane.

    A call that misses the deadline opens the lane's breaker, its job is told to give up, and a new thread
    takes the place of the one that hangs, up to `max_stuck_threads`. A thread whose call comes back late ends
    when it was replaced.

    Parameters
    ----------
    name : str
        Direction; names threads, and counters as `<name>.failed.<kind>`.
    core : Core
        The tier's shared state; its lock guards the lane.
    take : callable
        Returns the next job, or None; called with the lock.
    retry_in_s : callable
        Seconds until `take` is worth another try without a `wake`, or None where it is not.
    """

    def __init__(
        self,
        name: str,
        core: Core,
        take: Callable[[], Job | None],
        retry_in_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.name = name
        self.breaker = Breaker(core.settings.probe_interval_s)
        self.calls: list[Call] = []
        self.progress_s = time.monotonic()
        self._core = core
        self._take = take
        self._retry_in_s = retry_in_s
        self._wake = threading.Condition(core.lock)
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._serial = 0
        core.lanes.append(self)
        self._start()

    @property
    def late_calls(self) -> int:
        """Calls beyond their deadline that have not come back."""
        return sum(call.late for call in self.calls)

    @property
    def live_threads(self) -> int:
        """Threads of the lane, stuck ones included."""
        return len(self._threads)

    def due(self, now_s: float) -> bool:
        """Whether a call would be let through now: a thread is there for it, and the breaker agrees."""
        return len(self._threads) > self.late_calls and self.breaker.due(now_s)

    def allow(self, now_s: float) -> bool:
        """Let a call through, or not; while the breaker is open, one probe an interval."""
        return self.due(now_s) and self.breaker.allow(now_s)

    def wake(self) -> None:
        """Say that there is a job."""
        self._wake.notify()

    def expire(self, now_s: float) -> None:
        """Give up calls beyond their deadline."""
        for call in self.calls:
            if call.late or now_s - call.started_s <= self._core.settings.deadline_s:
                continue
            call.late = True
            self._core.counters.add(f"{self.name}.late_calls")
            self.breaker.trip(now_s)
            call.job.expire()
            if self.late_calls <= self._core.settings.max_stuck_threads and not self._stopping:
                self._start()

    def expires_in_s(self, now_s: float) -> float:
        """Seconds until the next call misses its deadline; infinite where none can."""
        ends = [call.started_s + self._core.settings.deadline_s for call in self.calls if not call.late]
        return max(0.0, min(ends) - now_s) if ends else float("inf")

    def stop(self) -> None:
        """Have threads end after the call they are in."""
        self._stopping = True
        self._wake.notify_all()

    def join(self, until_s: float) -> bool:
        """Wait for the threads until a time on the monotonic clock, without the lock; say if all ended."""
        for thread in list(self._threads):
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in list(self._threads))

    def _start(self) -> None:
        self._serial += 1
        name = f"hicache-tier {self.name} {self._serial}"
        thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # the machine has no thread left; the lane rests until a late call returns
            self._threads.remove(thread)
            self._core.counters.add(f"{self.name}.failed.no_thread")

    def _loop(self) -> None:
        while True:
            with self._core.lock:
                call = self._next_call()
                if call is None:
                    self._threads.remove(threading.current_thread())
                    self._core.done.notify_all()
                    return
            answer, error = _run(call.job)
            with self._core.lock:
                self._end(call, answer, error)
            del call, answer, error  # an idle thread holds on to nothing

    def _next_call(self) -> Call | None:
        """Wait for a job; None where this thread should end."""
        while not self._stopping and len(self._threads) - self.late_calls <= 1:
            job = self._take()
            if job is not None:
                call = Call(job, time.monotonic())
                self.calls.append(call)
                return call
            self._wake.wait(self._retry_in_s())
        return None

    def _end(self, call: Call, answer: object, error: BaseException | None) -> None:
        now_s = time.monotonic()
        self.calls.remove(call)
        core = self._core
        core.counters.add(f"{self.name}.calls")
        core.counters.add(f"{self.name}.seconds", now_s - call.started_s)
        if not call.late:
            self.progress_s = now_s
            self.breaker.succeed(call.started_s)
        if error is not None:
            core.counters.add(f"{self.name}.failed.{error_kind(error)}")
        try:
            call.job.finish(answer, error)
        except Exception as bug:  # noqa: BLE001 - whatever goes wrong, the thread lives on and it is counted
            core.counters.add(f"{self.name}.failed.internal_{error_kind(bug)}")
        core.settle()


def _run(job: Job) -> tuple[object, BaseException | None]:
    try:
        return job.run(), None
    except BaseException as error:  # noqa: BLE001 - a store may raise anything, SystemExit included
        return None, error.with_traceback(None)
