"""Lanes with an engine, streams and events of the test's own: what is submitted when, and what goes wrong."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import ClassVar

import pytest
import torch

from hicache_tier import lanes
from hicache_tier.completion import StreamCompletion
from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier.lanes import Job, Lane
from hicache_tier.pairing import Turn
from hicache_tier.paths import select_path
from hicache_tier_kernels import CopyPlan, EngineOptions

MLA = KVGeometry.mla(num_layers=4, latent_dim=16, dtype="uint8", page_tokens=2)
PATH = select_path("mla", "page_first", "kernel", sharded=False, op="load")
STEPS = [((0, 1), (0, 1)), ((2, 3), (2, 3))]
SUBMITTER = "hicache-load-submit"


class Event:
    def __init__(self, **_):
        self.recorded = None

    def record(self, stream):
        self.recorded = stream

    def query(self):
        return True

    def synchronize(self):
        pass


class Stream:
    def __init__(self, *_):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)

    def wait_stream(self, stream):
        self.waited.append(stream)

    def synchronize(self):
        self.waited.append("synchronized")

    def query(self):
        return True


class Engine:
    """Notes what it is asked for; is its own prepared plan."""

    by_layer = True

    name = "test"

    def __init__(self, *, cheap=True, streams=2, error=None, cost=0.0):
        self.cheap, self.streams, self.error, self.cost = cheap, streams, error, cost
        self.submitted = []
        self.threads = []
        self.prepared = 0

    def prepare(self, plan, stream, options):
        self.prepared += 1
        return self

    def seconds(self, planes):
        return self.cost * len(self.submitted)

    def submit(self, planes, stream):
        if self.error is not None and self.submitted:
            raise self.error
        self.submitted.append((tuple(planes), stream))
        self.threads.append(threading.current_thread())

    def fault(self):
        return None


@pytest.fixture(autouse=True)
def _no_device(monkeypatch):
    monkeypatch.setattr(lanes, "new_event", Event)
    monkeypatch.setattr(lanes, "new_stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the engine's stream")
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture
def started():
    released = threading.Event()

    def start(engine):
        with HostPool(MLA, "page_first", 4, pinned=False) as pool:
            plan = CopyPlan(pool.row_map(), pool.row_map(), torch.tensor([0]), torch.tensor([1]))
            completion = StreamCompletion(PATH, (0, 1, 2, 3), 1, 128, released.set)
            lane = Lane(torch.device("cpu"), "load")
            try:
                lane.start(Job(engine, Turn(plan), STEPS, EngineOptions(), completion))
            finally:
                assert released.wait(5), "what the transfer held was given back"
            return lane, completion

    return start


def test_a_cheap_engine_is_submitted_by_the_caller_on_two_streams(started):
    engine = Engine()
    lane, completion = started(engine)
    first, second = lane.streams
    assert set(engine.threads) == {threading.current_thread()}
    assert engine.submitted == [((0, 1), first), ((2, 3), second)]
    assert first.waited[0].recorded == "the engine's stream"
    assert first in second.waited
    assert second in first.waited, "the last event comes after both streams"
    completion.wait(1)
    completion.wait_layer(3, 1)


@pytest.mark.parametrize(("cost", "expected"), [(0.0, ["MainThread"] * 2), (1.0, ["MainThread", SUBMITTER])])
def test_the_caller_submits_what_costs_little_and_a_thread_the_rest(started, cost, expected):
    engine = Engine(cheap=False, streams=1, cost=cost)
    lane, completion = started(engine)
    completion.wait(5)
    assert [thread.name for thread in engine.threads] == expected
    assert engine.submitted == [(planes, lane.streams[0]) for _, planes in STEPS]
    assert engine.prepared == 1


@pytest.mark.parametrize(
    ("left", "expected"), [(0.4e-3, ["MainThread"] * 2), (2e-3, ["MainThread", SUBMITTER])]
)
def test_a_slow_moment_hands_over_what_is_worth_waking_a_thread_for(started, monkeypatch, left, expected):
    monkeypatch.setattr(lanes, "_PATIENCE_S", 1e-3)  # by estimate the caller may submit both steps
    engine = Engine(cheap=False, streams=1, cost=left)
    submit = engine.submit

    def slowly(planes, stream):
        submit(planes, stream)
        time.sleep(5e-3)

    engine.submit = slowly
    _, completion = started(engine)
    completion.wait(5)
    assert [thread.name for thread in engine.threads] == expected


def test_events_that_transfers_begin_behind_are_used_again():
    with HostPool(MLA, "page_first", 4, pinned=False) as pool:
        plan = CopyPlan(pool.row_map(), pool.row_map(), torch.tensor([0]), torch.tensor([1]))
        lane = Lane(torch.device("cpu"), "load")
        for _ in range(3):
            completion = StreamCompletion(PATH, (0, 1, 2, 3), 1, 128, lambda: None)
            lane.start(Job(Engine(), Turn(plan), STEPS, EngineOptions(), completion))
            completion.wait(5)
        begins = [event for event in lane.streams[0].waited if isinstance(event, Event)]
        assert len(begins) == 3
        assert len({id(event) for event in begins}) == 1
        assert begins[0].recorded == "the engine's stream"


def test_what_is_queued_goes_first(started):
    engine, held = Engine(cheap=False, streams=1), threading.Event()
    with HostPool(MLA, "page_first", 4, pinned=False) as pool:
        plan = CopyPlan(pool.row_map(), pool.row_map(), torch.tensor([0]), torch.tensor([1]))
        completion = StreamCompletion(PATH, (0, 1, 2, 3), 1, 128, lambda: None)
        lane = Lane(torch.device("cpu"), "load")
        lane._submitter.put(held.wait)
        lane.start(Job(engine, Turn(plan), STEPS, EngineOptions(), completion))
        assert not engine.submitted
        held.set()
        completion.wait(5)
    assert {thread.name for thread in engine.threads} == {SUBMITTER}


def test_what_cannot_be_parted_goes_in_one_step(started):
    engine = Engine()
    engine.by_layer = False
    _, completion = started(engine)
    assert [planes for planes, _ in engine.submitted] == [(0, 1, 2, 3)]
    completion.wait_layer(2, 1)


class Slow(Event):
    """Is over only when it is told so."""

    made: ClassVar[list] = []

    def __init__(self, **_):
        super().__init__()
        self.over = False
        self.made.append(self)

    def query(self):
        return self.over


def test_the_thread_keeps_few_steps_under_way(monkeypatch):
    """A driver whose queue is full would block whoever wants something of it."""
    monkeypatch.setattr(lanes, "new_event", Slow)
    monkeypatch.setattr(Slow, "made", [])
    engine = Engine(cheap=False, streams=1, cost=1.0)
    steps = [((number,), (number,)) for number in range(6)]
    with HostPool(MLA, "page_first", 4, pinned=False) as pool:
        plan = CopyPlan(pool.row_map(), pool.row_map(), torch.tensor([0]), torch.tensor([1]))
        completion = StreamCompletion(PATH, tuple(range(6)), 1, 128, lambda: None)
        lane = Lane(torch.device("cpu"), "load")
        lane.start(Job(engine, Turn(plan), steps, EngineOptions(), completion))
        for arrived in range(7):
            wanted = min(6, arrived + 3)
            deadline = time.monotonic() + 5
            while len(engine.submitted) < wanted and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.005)
            assert len(engine.submitted) == wanted
            if arrived < 6:
                Slow.made[1 + arrived].over = True  # the first says where the transfer begins
        completion.wait(5)


@pytest.mark.parametrize("cheap", [True, False])
def test_a_failure_half_way_waits_for_what_runs_and_is_raised(started, cheap):
    engine = Engine(cheap=cheap, error=RuntimeError("launch failed"), cost=1.0)
    if cheap:
        with pytest.raises(RuntimeError, match="launch failed"):
            started(engine)
        return
    lane, completion = started(engine)
    with pytest.raises(RuntimeError, match="launch failed"):
        completion.wait(5)
    with pytest.raises(RuntimeError, match="launch failed"):
        completion.wait_layer_on(3)
    assert all(stream.waited[-1] == "synchronized" for stream in lane.streams)


def test_a_task_that_fails_does_not_end_the_thread(caplog):
    worker = lanes._Submitter("test-worker")
    done = threading.Event()

    def fail():
        raise OSError("lost device")

    worker.put(fail)
    worker.put(done.set)
    assert done.wait(5)
    assert "test-worker: a task failed" in caplog.text
