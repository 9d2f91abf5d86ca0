"""A store that raises, or answers what is no answer; the number is the kind of the fault list."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hicache_tier import open_store
from hicache_tier.errors import ClosedError
from hicache_tier.testing.tier_rig import GEOMETRY, Rig, chain


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def raiser(error):
    def plan(keys):
        raise error

    return plan


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "I/O"),
        ValueError("x"),
        MemoryError(),
        RecursionError(),
        SystemExit(1),
        KeyboardInterrupt(),
        ClosedError("c"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_22_whatever_the_store_raises_costs_that_operation_only(rig, error):
    rig = rig(prefetch="wait_complete")
    keys = chain(1, 4)
    name = getattr(error, "kind", type(error).__name__)
    for verb in ("put", "match_prefix", "get"):
        rig.store.plan = {verb: raiser(error)}
        assert rig.insert(keys) == 4
        rig.idle()
        rig.tier.reset()
        rig.tier.match(keys)
        handle = rig.tier.prefetch(keys)
        assert handle.wait() == 0
        if verb == "put":
            assert handle.reason == "absent"
            rig.store.plan = {}
            rig.insert(keys)
            assert rig.tier.flush(5) == 0, rig.tier.stats()
            rig.tier.reset()
    stats = rig.idle()
    assert stats["writes"]["failed"] == {name: 1}
    assert stats["writes"]["failed_pages"] == {"call_failed": 4}
    assert stats["lookups"]["failed"] == {name: 1}
    assert stats["reads"]["failed"] == {name: 2}
    assert stats["misses"]["pages"]["lookup_failed"] == 4
    rig.store.plan = {}
    assert rig.tier.prefetch(keys).wait() == 4
    assert rig.load(keys) == 4


@pytest.mark.parametrize("verb", ["put", "get", "match_prefix"])
@pytest.mark.parametrize("answer", [None, [], [True], 3.7, -1, 10**9, "yes", [True] * 9])
def test_22_answers_that_are_none_prove_nothing(rig, verb, answer):
    rig = rig(prefetch="wait_complete", lookup_timeout_s=2.0)
    keys = chain(1, 4)
    rig.store.answer[verb] = answer
    rig.insert(keys)
    rig.idle()
    rig.tier.reset()
    rig.tier.match(keys)
    loaded = rig.tier.prefetch(keys).wait()
    assert rig.load(keys) == loaded
    rig.idle()
    rig.store.answer.clear()
    rig.insert(keys)
    assert rig.tier.flush(5) == 0, rig.tier.stats()
    assert rig.load(keys) == 4


def test_22_a_hundred_resets_and_tiers_leave_no_thread_and_no_descriptor(tmp_path):
    store = open_store(tmp_path / "store", GEOMETRY, "page_first", model="m", capacity_bytes="4 MiB")
    keys = chain(1, 4)
    rig = Rig(store, prefetch="wait_complete")
    rig.insert(keys)
    assert rig.tier.flush(5) == 0, rig.tier.stats()
    assert rig.tier.prefetch(keys).wait() == 4
    threads, before = set(threading.enumerate()), descriptors()
    for _ in range(100):
        rig.insert(keys)
        rig.tier.prefetch(chain(1, 6))
        rig.tier.reset()
    rig.idle()
    assert set(threading.enumerate()) <= threads
    assert descriptors() <= before
    assert rig.account()["host"]["free_pages"] == 16
    for _ in range(20):
        with Rig(store).tier as tier:
            tier.match(keys)
    assert set(threading.enumerate()) <= threads
    assert rig.tier.close(5).clean
    rig.host.close()
    assert len(threads.intersection(threading.enumerate())) <= len(threads) - 3
    store.close()
