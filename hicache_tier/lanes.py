"""Streams and threads of a device's transfers, one lane for each direction.

Transfers never run on the engine's streams. A lane has two streams of its own, which wait for an event on
the caller's stream and for nothing else; a thread that submits what would keep the caller too long; and a
thread that gives back what transfers held once they are over.
"""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from hicache_tier_kernels.engine import new_event, new_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_tier_kernels import CopyPlan, Engine, EngineOptions

    from .completion import StreamCompletion

    Step = tuple[tuple[int, ...], Sequence[int]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A transfer to start.

    Attributes
    ----------
    engine : Engine
    plan : CopyPlan
    steps : sequence
        Layers and their planes, in the order to submit; joined where the engine cannot part them.
    options : EngineOptions
    completion : StreamCompletion
        Learns of everything that happens.
    """

    engine: Engine
    plan: CopyPlan
    steps: Sequence[Step]
    options: EngineOptions
    completion: StreamCompletion


class Lane:
    """Transfers of one device in one direction."""

    def __init__(self, device: torch.device, op: str) -> None:
        self._device = device
        self._streams = (new_stream(device), new_stream(device))
        self._submitter = _Worker(f"hicache-{op}-submit")
        self._reaper = _Worker(f"hicache-{op}-reap")

    def start(self, job: Job) -> None:
        """Begin a transfer behind all that the caller's current stream has been given so far.

        What goes wrong is raised here where the caller's thread submits, and by the completion in any case.
        """
        begin = new_event()
        begin.record(torch.cuda.current_stream(self._device))
        if job.engine.cheap:
            self._submit(job, begin)
        else:
            self._submitter.put(partial(self._submit_quietly, job, begin))

    def _submit_quietly(self, job: Job, begin: torch.cuda.Event) -> None:
        with suppress(BaseException):  # the completion raises it where it is waited for
            self._submit(job, begin)

    def _submit(self, job: Job, begin: torch.cuda.Event) -> None:
        try:
            with torch.cuda.device(self._device):
                self._enqueue(job, begin)
        except BaseException as error:
            self._abandon(job.completion, error)
            raise
        self._reaper.put(partial(_reap, job.completion))

    def _enqueue(self, job: Job, begin: torch.cuda.Event) -> None:
        main, completion, steps = self._streams[0], job.completion, job.steps
        main.wait_event(begin)
        plan = job.plan
        if plan.indices_on_device and not job.engine.cheap:
            with torch.cuda.stream(main):  # waits for what made the page numbers, not for the device
                plan = plan.on_host()
        prepared = job.engine.prepare(plan, main, job.options)
        if not prepared.by_layer:
            every = tuple(layer for layers, _ in steps for layer in layers)
            steps = [(every, range(len(job.plan.source.planes)))]
        streams = self._streams[: min(prepared.streams, len(steps))]
        for stream in streams[1:]:
            stream.wait_stream(main)
        for number, (layers, planes) in enumerate(steps):
            stream = streams[number % len(streams)]
            prepared.submit(planes, stream)
            arrival = new_event()
            arrival.record(stream)
            completion.arrive(layers, arrival)
        for stream in streams[1:]:
            main.wait_stream(stream)
        last, over = new_event(), new_event(blocking=True)
        last.record(main)
        over.record(main)
        completion.submitted(last, over, prepared)

    def _abandon(self, completion: StreamCompletion, error: BaseException) -> None:
        """Let what was submitted come to its end, then say that the transfer failed."""
        try:
            for stream in self._streams:
                stream.synchronize()
        finally:
            completion.fail(error)


@cache
def lane_of(device: torch.device, op: str) -> Lane:
    """Return the lane of a device for `backup` or `load`."""
    return Lane(device, op)


def _reap(completion: StreamCompletion) -> None:
    """Give back what a transfer held once the device has left it, or is lost."""
    try:
        completion.synchronize()
    finally:
        completion.finish()


class _Worker:
    """A thread that does one thing after another; it ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def put(self, task: Callable[[], None]) -> None:
        """Queue a task."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                task()
            except Exception:  # one transfer's trouble must not keep the pages of the next
                log.exception("%s: a task failed", self._name)
            del task  # holds a transfer, which may hold a pool
