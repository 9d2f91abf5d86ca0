"""How the copy engine shares ranges between two threads, without a device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hicache_tier_kernels import copy_engine
from hicache_tier_kernels.copy_engine import LEAST_SHARED, share_ranges


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))


class Side:
    def __init__(self, log):
        self.stream = Stream("side", log)
        self._pool = ThreadPoolExecutor(1)

    def call(self, function, *arguments):
        return self._pool.submit(function, *arguments)


@pytest.fixture
def shared(monkeypatch):
    """Return a call that shares so many ranges, and what was copied on which stream, in which order."""
    log = []

    def record(destinations, sources, sizes, stream):
        log.append(
            (
                stream.name,
                "copies",
                list(zip(*(map(int, x) for x in (destinations, sources, sizes)), strict=True)),
            )
        )

    monkeypatch.setattr(copy_engine, "copy_ranges", record)

    def share(count):
        ranges = (np.arange(count, dtype=np.uint64) + start for start in (0, count, 2 * count))
        share_ranges(*ranges, Stream("main", log), Side(log))
        return log

    return share


@pytest.mark.parametrize("count", [1, 2, LEAST_SHARED, 5001])
def test_ranges_are_shared_and_each_is_copied_once(shared, count):
    log = shared(count)
    copied = {stream: ranges for stream, what, ranges in log if what == "copies"}
    expected = [(n, n + count, n + 2 * count) for n in range(count)]
    assert copied["main"] + copied["side"] == expected
    assert abs(len(copied["main"]) - len(copied["side"])) <= 1
    assert log[0] == ("side", "waits for", "main")
    assert log[-1] == ("main", "waits for", "side")


@pytest.mark.parametrize("failing", ["main", "side"])
def test_a_failure_of_either_is_raised_once_both_are_through(monkeypatch, failing):
    log = []

    def fail(_destinations, _sources, _sizes, stream):
        log.append((stream.name, "copies", ()))
        if stream.name == failing:
            raise OSError(failing)

    monkeypatch.setattr(copy_engine, "copy_ranges", fail)
    ranges = [np.arange(LEAST_SHARED, dtype=np.uint64)] * 3
    with pytest.raises(OSError, match=failing):
        share_ranges(*ranges, Stream("main", log), Side(log))
    assert {stream for stream, what, _ in log if what == "copies"} == {"main", "side"}
    assert log[-1] == ("main", "waits for", "side")
