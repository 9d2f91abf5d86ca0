"""Streams and threads of a device's transfers, one lane for each direction.

Transfers never run on the engine's streams. A lane has two streams of its own, which wait for an event on
the caller's stream and for nothing else; a thread that submits what would keep the caller too long; and a
thread that gives back what transfers held once they are over.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from hicache_tier_kernels.engine import new_event, new_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_tier_kernels import Engine, EngineOptions, Prepared

    from .completion import StreamCompletion
    from .pairing import Turn

    Step = tuple[tuple[int, ...], Sequence[int]]

Task = TypeVar("Task")

log = logging.getLogger(__name__)

_UNDER_WAY_S = 1e-3
_LEAST_UNDER_WAY = 3
_POLL_S = 200e-6
"""How much submitted work, by what submitting it costs, and how many steps at least may wait for the device.

A driver whose queue is full blocks within the call, and with it threads that want something else of it."""
_LAST_WAIT_S = 10.0
_REAP_S = 4e-3

_PATIENCE_S = 30e-6
"""What submitting one layer may cost the caller of an engine that is not cheap, by the engine's estimate.

By a clock, a slow moment would hand over what little there is to a thread that must wake up first, which
takes milliseconds on a busy machine. Only where that much is left the clock counts too."""
_WAKING_S = 1e-3
"""What waking that thread may take."""


@dataclass(frozen=True, slots=True)
class Job:
    """A transfer to start.

    Attributes
    ----------
    engine : Engine
    turn : Turn
        The plan of all layers, and what engines prepared for it before.
    steps : sequence
        Layers and their planes, in the order to submit; joined where the engine cannot part them.
    options : EngineOptions
    completion : StreamCompletion
        Learns of everything that happens.
    """

    engine: Engine
    turn: Turn
    steps: Sequence[Step]
    options: EngineOptions
    completion: StreamCompletion

    def prepare(self, stream: torch.cuda.Stream) -> Prepared:
        """Return what the engine made of the plan, this time or before."""
        known, key = self.turn.prepared, (self.engine.name, self.options)
        found = known.get(key)
        if found is not None:
            return found
        plan = self.turn.plan
        if not plan.indices_on_device:
            return known.setdefault(key, self.engine.prepare(plan, stream, self.options))
        if not self.engine.cheap:
            with torch.cuda.stream(stream):  # waits for what made the page numbers, not for the device
                plan = plan.on_host()
        return self.engine.prepare(plan, stream, self.options)


class Lane:
    """Transfers of one device in one direction."""

    def __init__(self, device: torch.device, op: str) -> None:
        self.device = device
        self.streams = (new_stream(device), new_stream(device))
        self._submitter = _Submitter(f"hicache-{op}-submit")
        self._reaper = _Reaper(f"hicache-{op}-reap")
        self.spare_events: deque[torch.cuda.Event] = deque()

    def start(self, job: Job) -> None:
        """Begin a transfer behind all that the caller's current stream has been given so far.

        The caller's thread submits what costs little: all of it where the engine is cheap, else as much as
        its patience allows while nothing else is queued, so that the device need not wait for a thread to
        wake up. What goes wrong there is raised here, and by the completion in any case.
        """
        try:
            begin = self.spare_events.pop()
        except IndexError:
            begin = new_event()
        begin.record(torch.cuda.current_stream(self.device))
        submission = _Submission(self, job, begin)
        if job.engine.cheap:
            self._submit(submission, None)
        elif self._submitter.behind or job.turn.plan.indices_on_device:
            self._submitter.put(partial(self._submit_quietly, submission))
        else:
            patience = _PATIENCE_S * len(job.completion.layers)
            if not self._submit(submission, patience):
                self._submitter.put(partial(self._submit_quietly, submission))

    def _submit_quietly(self, submission: _Submission) -> None:
        with suppress(BaseException):  # the completion raises it where it is waited for
            self.streams[0].query()  # of CUDA's runtime: gives this thread the context that the driver wants
            self._submit(submission, None)

    def _submit(self, submission: _Submission, seconds: float | None) -> bool:
        """Submit what takes so long, or all; returns whether it came to the end."""
        completion = submission.job.completion
        try:
            if torch.cuda.current_device() == self.device.index:  # entering a device costs, cold, 50 us
                done = submission.run(seconds)
            else:
                with torch.cuda.device(self.device):
                    done = submission.run(seconds)
        except BaseException as error:
            self._abandon(completion, error)
            raise
        if done:
            self._reaper.put(completion)
        return done

    def _abandon(self, completion: StreamCompletion, error: BaseException) -> None:
        """Let what was submitted come to its end, then say that the transfer failed."""
        try:
            for stream in self.streams:
                stream.synchronize()
        finally:
            completion.fail(error)


class _Submission:
    """A job on its way to the device; one thread may go on where another left off."""

    def __init__(self, lane: Lane, job: Job, begin: torch.cuda.Event) -> None:
        self.job = job
        self._lane = lane
        self._begin: torch.cuda.Event | None = begin
        self._at = 0
        self._under_way: deque[tuple[torch.cuda.Event, float]] = deque()

    def run(self, patience: float | None) -> bool:
        """Submit steps while they cost less than `patience` seconds; returns whether all are submitted."""
        if self._begin is not None:
            self._open(self._begin)
            self._begin = None
        prepared, streams, steps = self._prepared, self._streams, self._steps
        cheap = self.job.engine.cheap
        until_s = time.perf_counter() + (patience or 0.0)
        while self._at < len(steps):
            layers, planes = steps[self._at]
            if not cheap:
                seconds = prepared.seconds(planes)
                if patience is None:
                    self._await_room(seconds)
                elif seconds > patience or self._is_late(until_s, seconds):
                    return False
                else:
                    patience -= seconds
            stream = streams[self._at % len(streams)]
            prepared.submit(planes, stream)
            arrival = new_event()
            arrival.record(stream)
            self.job.completion.arrive(layers, arrival)
            if not cheap:
                self._under_way.append((arrival, seconds))
            self._at += 1
        main = streams[0]
        for stream in streams[1:]:
            main.wait_stream(stream)
        if len(streams) > 1:
            arrival = new_event()
            arrival.record(main)
        self.job.completion.submitted(arrival, prepared)
        return True

    def _is_late(self, until_s: float, seconds: float) -> bool:
        """Return whether the caller has had enough, and enough is left for another thread to wake up for."""
        return seconds * (len(self._steps) - self._at) > _WAKING_S and time.perf_counter() > until_s

    def _await_room(self, seconds: float) -> None:
        """Sleep until little enough of this transfer waits for the device."""
        waiting = self._under_way
        while len(waiting) >= _LEAST_UNDER_WAY and sum(cost for _, cost in waiting) + seconds > _UNDER_WAY_S:
            arrival, _ = waiting[0]
            while not arrival.query():  # type: ignore[no-untyped-call]
                time.sleep(_POLL_S)
            waiting.popleft()

    def _open(self, begin: torch.cuda.Event) -> None:
        job, main = self.job, self._lane.streams[0]
        main.wait_event(begin)
        self._lane.spare_events.append(begin)  # what the stream waits for is settled: it may be recorded anew
        self._prepared = prepared = job.prepare(main)
        self._steps = job.steps
        if not prepared.by_layer and len(job.steps) > 1:
            layers = tuple(layer for layers, _ in job.steps for layer in layers)
            self._steps = [(layers, range(len(job.turn.plan.source.planes)))]
        self._streams = self._lane.streams[: min(prepared.streams, len(self._steps))]
        for stream in self._streams[1:]:
            stream.wait_stream(main)


@cache
def lane_of(device: torch.device, op: str) -> Lane:
    """Return the lane of a device for `backup` or `load`."""
    return Lane(device, op)


class _Worker(Generic[Task]):
    """A thread that does one thing after another; before the process ends it does what is queued."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changing = threading.Lock()
        self._given = self._done = 0

    @property
    def behind(self) -> bool:
        """Whether a task is queued or under way."""
        return self._given != self._done

    def put(self, task: Task) -> None:
        """Queue a task."""
        with self._changing:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
                atexit.register(self._stop)  # a thread in CUDA when the interpreter goes would abort it
            self._given += 1
        self._tasks.put(task)

    def do(self, task: Task) -> None:
        """Do one task."""
        raise NotImplementedError

    def _stop(self) -> None:
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join(_LAST_WAIT_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self.do(task)
            except Exception:  # one transfer's trouble must not keep the pages of the next
                log.exception("%s: a task failed", self._name)
            self._done += 1
            del task  # holds a transfer, which may hold a pool


class _Submitter(_Worker["Callable[[], None]"]):
    """Submits transfers."""

    def do(self, task: Callable[[], None]) -> None:
        """Call it."""
        task()


class _Reaper(_Worker["StreamCompletion"]):
    """Gives back what transfers held once the device has left them, or is lost.

    It looks now and then: a thread that woke up at the end of each would take the interpreter from the one
    that submits the next. Who asks `done` gives back at once.
    """

    def do(self, task: StreamCompletion) -> None:
        """Wait until a transfer is over; those behind it on the lane are over later."""
        try:
            while not task.done():
                time.sleep(_REAP_S)
        finally:
            task.finish()
