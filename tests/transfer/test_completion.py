"""Completions of transfers on streams, with events that the test moves by hand."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_tier.completion import Completion, StreamCompletion
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.paths import select_path

PATH = select_path("mla", "page_first", "kernel", sharded=False, op="load")


class Event:
    def __init__(self):
        self.over = threading.Event()
        self.waiters = []

    def query(self):
        return self.over.is_set()

    def synchronize(self):
        assert self.over.wait(10)

    def wait(self, stream=None):
        self.waiters.append(stream)


class Prepared:
    def __init__(self, error=None):
        self.error = error

    def fault(self):
        return self.error


@pytest.fixture
def released():
    return []


@pytest.fixture
def transfer(released):
    return StreamCompletion(PATH, (0, 2, 5), 7, 700, lambda: released.append(True))


def submit(transfer, error=None):
    arrivals = {layer: Event() for layer in transfer.layers}
    for layer, event in arrivals.items():
        transfer.arrive([layer], event)
    last = Event()
    transfer.submitted(last, Prepared(error))
    return arrivals, last


def test_layers_arrive_and_the_pool_is_released_once(transfer, released):
    arrivals, last = submit(transfer)
    assert not transfer.done()
    assert "under way" in repr(transfer)
    arrivals[0].over.set()
    transfer.wait_layer(0, 1)
    with pytest.raises(TimeoutError, match="still under way"):
        transfer.wait_layer(2, 0.01)
    with pytest.raises(TimeoutError, match="still under way"):
        transfer.wait(0.01)
    assert not released
    last.over.set()
    transfer.wait(1)
    transfer.wait()
    transfer.finish()
    assert transfer.done()
    assert released == [True]
    assert "done" in repr(transfer)


def test_streams_wait_without_the_host(transfer):
    arrivals, last = submit(transfer)
    transfer.wait_layer_on(5, "compute")
    transfer.wait_on("compute")
    transfer.wait_on()
    assert arrivals[5].waiters == ["compute"]
    assert last.waiters == ["compute", None]


def test_who_waits_before_the_submission_is_woken(transfer):
    started = threading.Event()

    def compute():
        started.set()
        transfer.wait_layer_on(2)

    waiting = threading.Thread(target=compute)
    waiting.start()
    assert started.wait(5)
    time.sleep(0.02)
    assert waiting.is_alive()
    submit(transfer)
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_wait_for_the_submission_ends_too(transfer):
    with pytest.raises(TimeoutError, match="not submitted"):
        transfer.wait(0.01)
    with pytest.raises(TimeoutError, match="not submitted"):
        transfer.wait_layer(0, 0.01)


def test_a_failed_submission_is_raised_by_every_wait(transfer, released):
    transfer.fail(RuntimeError("the driver says no"))
    assert transfer.done()
    assert released == [True]
    for wait in (
        transfer.wait,
        transfer.wait_on,
        lambda: transfer.wait_layer(0),
        lambda: transfer.wait_layer_on(5),
    ):
        with pytest.raises(RuntimeError, match="the driver says no"):
            wait()


def test_what_the_device_refused_is_raised(transfer, released):
    arrivals, last = submit(transfer, InvalidArgumentError("page 9 is not there"))
    arrivals[0].over.set()
    with pytest.raises(InvalidArgumentError, match="page 9"):
        transfer.wait_layer(0, 1)
    assert not transfer.done(), "the device still reads what the transfer holds"
    assert not released
    last.over.set()
    with pytest.raises(InvalidArgumentError, match="page 9"):
        transfer.wait(1)
    assert transfer.done()
    assert released == [True]


@pytest.mark.parametrize("make", [Completion, lambda *a: StreamCompletion(*a, lambda: None)])
def test_a_layer_that_does_not_move(make):
    transfer = make(PATH, (0, 2, 5), 7, 700)
    for wait in (transfer.wait_layer, transfer.wait_layer_on):
        with pytest.raises(InvalidArgumentError, match="layer 1 is not part"):
            wait(1)


def test_a_finished_transfer_waits_for_nothing():
    transfer = Completion(PATH, (0,), 1, 100)
    transfer.wait(0)
    transfer.wait_on()
    transfer.wait_layer(0)
    transfer.wait_layer_on(0)
    assert transfer.done()
