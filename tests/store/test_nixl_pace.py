"""How often NIXL is asked how a transfer goes, on a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hicache_tier_storage import flights, nixl_lane
from hicache_tier_storage.descriptors import Descriptors
from hicache_tier_storage.nixl_lane import NixlLane
from hicache_tier_storage.pace import Pace

MIB = 1 << 20
LATE = 0.08
"""By which share of its time a transfer may be noticed late where its pace is known."""


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def sleep(self, seconds):
        assert seconds >= 0
        self.now += seconds

    def module(self):
        return SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)


class Lane(NixlLane):
    """A lane whose transfers take as long as the test says."""

    def __init__(self, clock):
        self.clock, self.post_s = clock, 0.0
        self._paces = {True: Pace(), False: Pace()}

    def post(self, pieces, files, *, write):
        self.clock.sleep(self.post_s)
        until = self.clock.now + self.takes_s

        def ended():
            self.asked += 1
            return self.clock.now >= until

        return SimpleNamespace(ended=ended, finish=lambda: None, stop=lambda _: None)

    def time(self, takes_s, nbytes=32 * MIB, pieces=16, *, write=True):
        """Return how often it was asked, and by what share it was noticed late."""
        self.takes_s, self.asked, start = takes_s, 0, self.clock.now
        rows = np.full((pieces, 3), nbytes // pieces, np.uint64)
        self.transfer(Descriptors(rows, rows, np.zeros(pieces, np.int64)), {}, write=write)
        return self.asked, (self.clock.now - start) / max(takes_s, 1e-9) - 1


@pytest.fixture
def lane(monkeypatch):
    clock = Clock()
    for module in (flights, nixl_lane):
        monkeypatch.setattr(module, "time", clock.module())
    return Lane(clock)


def test_a_lane_that_knows_its_pace_asks_little_and_is_hardly_late(lane):
    first, _ = lane.time(0.03)
    later = [lane.time(0.03 * (1 + 0.1 * (number % 2))) for number in range(8)]
    assert first > 40
    assert max(asked for asked, _ in later) < 15
    assert max(late for _, late in later) < LATE


def test_reads_do_not_go_by_the_pace_of_writes(lane):
    lane.time(0.03, write=True)
    asked, late = lane.time(0.003, write=False)
    assert asked > 15
    assert late < LATE


@pytest.mark.parametrize("nbytes", [0, 16, 4096, 64 << 10, 512 << 10])
def test_short_transfers_tell_nothing_of_long_ones(lane, nbytes):
    """They take as long as the least there is, whatever their bytes."""
    for _ in range(3):
        assert lane.time(0.0003, nbytes)[1] < LATE * 3
        assert lane.time(0.003, 8 * MIB)[1] < LATE
        assert lane.time(0.012, 32 * MIB)[1] < LATE


def test_a_device_that_became_faster_is_followed_at_once(lane):
    for _ in range(4):
        lane.time(0.08)
    late = [lane.time(0.01)[1] for _ in range(5)]
    assert late[1] < 2.5
    assert max(late[3:]) < LATE


def test_a_device_that_became_slower_is_followed(lane):
    for _ in range(4):
        lane.time(0.01)
    asked, late = [lane.time(0.03) for _ in range(12)][-1]
    assert asked < 15
    assert late < LATE


def test_what_held_up_one_transfer_does_not_hold_up_the_next(lane):
    for _ in range(4):
        lane.time(0.01)
    lane.time(0.2)
    assert [lane.time(0.01)[1] for _ in range(3)] == [pytest.approx(0, abs=LATE)] * 3


def test_a_transfer_that_ends_only_if_it_is_asked_is_asked_at_once(lane):
    for _ in range(4):
        lane.time(0.03)
    asked, _ = lane.time(0.03, pieces=nixl_lane._KERNEL_QUEUE + 1)
    assert asked > 40


def test_what_ends_while_it_is_posted_is_not_waited_for(lane):
    lane.post_s = 0.03
    for _ in range(4):
        start = lane.clock.now
        asked, _ = lane.time(0.0)
        assert (asked, round(lane.clock.now - start, 6)) == (1, 0.03)


def test_no_nap_is_long(lane):
    for _ in range(4):
        lane.time(10.0)
    start = lane.clock.now
    lane.time(0.001)
    assert lane.clock.now - start < 0.06
