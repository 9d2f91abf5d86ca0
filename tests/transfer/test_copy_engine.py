"""How the copy engine shares batches between two threads, without a device."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from hicache_tier_kernels import copy_engine
from hicache_tier_kernels.copy_engine import BATCH, batches_of, share_batches


class Stream:
    def __init__(self, name, log):
        self.cuda_stream, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.cuda_stream, "waits for", other.cuda_stream))


class Side:
    """A thread that begins when the test lets it."""

    def __init__(self, log, begin):
        self.stream = Stream("side", log)
        self._begin = begin

    def call(self, function, *arguments):
        self.future = Future()
        self.thread = threading.Thread(target=self._run, args=(function, arguments))
        self.thread.start()
        return self.future

    def _run(self, function, arguments):
        self._begin.wait(10)
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(function(*arguments))
            except BaseException as error:
                self.future.set_exception(error)


@pytest.fixture
def copied(monkeypatch):
    """Return what was copied, as (stream, first destination), and let a test act on each copy."""
    log = []

    def act(_stream):
        pass

    found = SimpleNamespace(log=log, act=act)

    def copy_batch(ranges, part, stream):
        log.append((stream, "copies", *ranges[0, part].tolist()))
        found.act(stream)

    monkeypatch.setattr(copy_engine, "driver", lambda: SimpleNamespace(copy_batch=copy_batch))
    return found


def some_batches(count):
    ranges = np.array([range(count), range(count), [1] * count], dtype=np.uint64)
    return deque((ranges, slice(n, n + 1)) for n in range(count))


@pytest.mark.parametrize("count", [0, 1, 64, 65, 5000])
def test_batches_hold_each_range_once_and_few_at_first(count):
    parts = list(batches_of(count))
    covered = [n for part in parts for n in range(count)[part]]
    assert covered == list(range(count))
    assert all(part.stop - part.start <= BATCH for part in parts)
    assert all(part.stop - part.start == min(64, count) for part in parts[:1])


def test_two_threads_take_the_next_batch_each(copied):
    both = threading.Barrier(2, timeout=10)
    turns = iter(range(2))

    def act(_stream):
        if next(turns, None) is not None:  # the first batch of either waits for that of the other
            both.wait()

    copied.act = act
    begin = threading.Event()
    begin.set()
    share_batches(some_batches(20), Stream("main", copied.log), Side(copied.log, begin))
    done = [(stream, n) for stream, what, n in copied.log if what == "copies"]
    assert sorted(n for _, n in done) == list(range(20)), "each batch once"
    assert {stream for stream, _ in done} == {"main", "side"}
    assert copied.log[0] == ("side", "waits for", "main")
    assert copied.log[-1] == ("main", "waits for", "side")


def test_a_thread_that_does_not_wake_up_is_not_waited_for(copied):
    begin = threading.Event()
    side = Side(copied.log, begin)
    share_batches(some_batches(20), Stream("main", copied.log), side)
    assert [n for stream, what, n in copied.log if (stream, what) == ("main", "copies")] == list(range(20))
    begin.set()
    side.thread.join(10)
    assert not [n for stream, what, n in copied.log if (stream, what) == ("side", "copies")]


@pytest.mark.parametrize(
    ("count", "nbytes", "shared"),
    [(511, 4096, False), (512, 4096, True), (512, (128 << 10) - 1, True), (4096, 128 << 10, False)],
)
def test_many_short_ranges_are_shared(copied, monkeypatch, count, nbytes, shared):
    begin = threading.Event()
    begin.set()
    monkeypatch.setattr(copy_engine, "side_of", lambda *_: Side(copied.log, begin))
    stream = Stream("main", copied.log)
    stream.device = "cuda:0"
    ranges = np.array([range(count), range(count), [nbytes] * count], dtype=np.uint64)
    copy_engine.submit_ranges(ranges, stream, backup=True)
    assert (("main", "waits for", "side") in copied.log) is shared
    done = [n for _, what, *numbers in copied.log if what == "copies" for n in numbers]
    assert sorted(done) == list(range(count))


@pytest.mark.parametrize("failing", ["main", "side"])
def test_a_failure_of_either_is_raised_once_both_are_through(copied, failing):
    both = threading.Barrier(2, timeout=10)
    turns = iter(range(2))

    def act(stream):
        if next(turns, None) is not None:
            both.wait()
        if stream == failing:
            raise OSError(failing)

    copied.act = act
    begin = threading.Event()
    begin.set()
    side = Side(copied.log, begin)
    with pytest.raises(OSError, match=failing):
        share_batches(some_batches(20), Stream("main", copied.log), side)
    assert side.future.done()
    assert copied.log[-1] == ("main", "waits for", "side")
