"""A store that is slow or hangs, and comes back; the number is the kind of the fault list."""

from __future__ import annotations

import time

from hicache_tier.testing.faults import Gate
from hicache_tier.testing.tier_rig import chain

PROMPT_S = 0.5  # what "at once" means on a busy machine


def timed(call):
    start = time.monotonic()
    result = call()
    return result, time.monotonic() - start


def test_21_slow_writes_drop_the_oldest_and_block_nobody(rig):
    rig = rig(host_pages=64, device_pages=64, write_queue_pages=8, batch_pages=4)
    gate = rig.store.plan["put"] = Gate()
    first = chain(0, 4)
    rig.insert(first)
    gate.wait_for(1)
    for seed in range(1, 9):
        held, seconds = timed(lambda seed=seed: rig.insert(chain(seed, 4)))
        assert held == 4
        assert seconds < PROMPT_S
        assert rig.account()["queues"]["write_pages"] <= 8
    gate.open()
    stats = rig.idle()
    assert stats["writes"]["dropped_pages"] == {"queue_full": 24}
    assert rig.check_stored(chain(7, 4) + chain(8, 4)) == [True] * 8, "the newest were kept"
    assert rig.tier.flush(5) == 0, "what was dropped can be written later"


def test_21_dropped_tails_leave_prefixes(rig):
    rig = rig(host_pages=32, write_queue_pages=8)
    gate = rig.store.plan["put"] = Gate()
    rig.insert(chain(0, 1))
    gate.wait_for(1)
    rig.insert(chain(1, 6))
    rig.insert(chain(2, 5))
    gate.open()
    rig.idle()
    assert rig.check_stored(chain(1, 6)) == [True] * 3 + [False] * 3
    assert rig.check_stored(chain(2, 5)) == [True] * 5


def test_21_a_store_that_hangs_opens_the_breaker_and_it_closes_by_itself(rig):
    rig = rig(
        host_pages=64,
        deadline_s=0.15,
        probe_interval_s=0.2,
        lookup_timeout_s=0.1,
        prefetch="wait_complete",
        batch_pages=4,
    )
    stored = chain(0, 8)
    rig.preload(stored)
    gates = {verb: Gate() for verb in ("put", "get", "match_prefix")}
    rig.store.plan.update(gates)
    handle, seconds = timed(lambda: rig.tier.prefetch(stored))
    assert seconds < PROMPT_S
    held, seconds = timed(lambda: rig.insert(chain(1, 4)))
    assert held == 4
    assert seconds < PROMPT_S
    match, seconds = timed(lambda: rig.tier.match(chain(1, 4) + stored))
    assert (match.host_pages, match.store_pages) == (4, 0)
    assert seconds < PROMPT_S
    assert handle.wait() == 0
    assert handle.reason == "deadline"
    rig.until(lambda s: all(lane["breaker"] == "open" for lane in s["lanes"].values()))
    refused = rig.tier.prefetch(stored)
    assert refused.done
    assert refused.reason == "breaker_open"
    rig.insert(chain(2, 4))
    stats = rig.account()
    assert stats["writes"]["dropped_pages"]["breaker_open"] == 4
    assert stats["reads"]["late_calls"] == 1 == stats["writes"]["late_calls"]
    _, seconds = timed(lambda: rig.tier.match(stored))
    assert seconds < PROMPT_S
    assert rig.load(chain(1, 4)) == 4, "the host tier goes on"
    for gate in gates.values():
        gate.open()
    rig.store.plan.clear()
    time.sleep(0.25)
    assert rig.tier.match(stored).store_pages == 8
    assert rig.tier.prefetch(stored).wait() == 8
    assert rig.load(stored) == 8
    assert rig.insert(chain(3, 4)) == 4
    rig.until(lambda s: all(lane["breaker"] == "closed" for lane in s["lanes"].values()))
    assert rig.tier.flush(5) == 0, rig.tier.stats()
    assert rig.check_stored(chain(1, 4) + chain(3, 4)) == [True] * 8


def test_21_a_call_that_never_returns_costs_one_thread_and_its_pages(rig):
    rig = rig(host_pages=16, deadline_s=0.1, probe_interval_s=0.1, prefetch="wait_complete")
    stored = chain(1, 4)
    rig.preload(stored)
    lost = rig.store.plan["get"] = Gate()
    assert rig.tier.prefetch(stored).wait() == 0
    rig.store.plan.pop("get")
    time.sleep(0.15)
    assert rig.tier.prefetch(stored).wait() == 4
    stats = rig.account()
    assert stats["lanes"]["reads"] == {
        "threads": 2,
        "calls_in_flight": 1,
        "late_calls": 1,
        "breaker": "closed",
        "breaker_opened": 1,
    }
    assert stats["host"]["detached_pages"] == 4
    assert rig.insert(chain(2, 16)) == 12, "the lost pages are handed to nobody"
    report, seconds = timed(lambda: rig.tier.close(0.5))
    assert seconds < 0.5 + PROMPT_S
    assert report.abandoned_calls == ("reads",)
    assert report.abandoned_pages == 4
    assert rig.host.free_pages == 12
    lost.open()
    rig.until(lambda s: s["host"]["free_pages"] == 16)
    rig.until(lambda s: s["lanes"]["reads"]["threads"] == 0)


def test_21_stuck_threads_are_bounded(rig):
    rig = rig(host_pages=64, deadline_s=0.05, probe_interval_s=0.01, max_stuck_threads=2, batch_pages=1)
    gate = rig.store.plan["put"] = Gate()
    end = time.monotonic() + 1.0
    seed = 0
    while time.monotonic() < end:
        seed += 1
        rig.insert(chain(seed, 1))
        time.sleep(0.01)
    lane = rig.account()["lanes"]["writes"]
    assert lane["late_calls"] == 3
    assert lane["threads"] == 3
    gate.open()
    rig.until(lambda s: s["lanes"]["writes"]["threads"] == 1)
    assert rig.tier.flush(5) == 0, rig.tier.stats()


def test_21_reads_go_before_writes(rig):
    rig = rig(host_pages=64, batch_pages=2, write_yield_s=5.0, prefetch="wait_complete")
    order = []
    stored = chain(0, 8)
    rig.preload(stored)
    gate = Gate()
    rig.store.plan = {
        "put": lambda keys: order.append("put"),
        "get": lambda keys: (order.append("get"), gate(keys)),
    }
    handle = rig.tier.prefetch(stored)
    gate.wait_for(1)
    rig.insert(chain(1, 4))
    gate.open()
    assert handle.wait() == 8
    rig.idle()
    assert order == ["get"] * 4 + ["put"] * 2


def test_21_best_effort_takes_what_has_arrived(rig):
    rig = rig(batch_pages=2)
    keys = chain(1, 8)
    rig.preload(keys)
    gate = rig.store.plan["get"] = Gate()
    handle = rig.tier.prefetch(keys)
    gate.let_one_pass()
    rig.until(lambda s: s["queues"]["read_pages"] == 6)
    assert handle.result == 2
    assert not handle.done
    count, seconds = timed(handle.wait)
    assert count == 2
    assert seconds < PROMPT_S
    assert handle.reason == "stopped"
    gate.open()
    assert rig.idle()["reads"]["loaded_pages"] == 4, "the batch under way was let in, the others never read"


def test_21_timeout_policy_bounds_the_wait(rig):
    rig = rig(prefetch="timeout", prefetch_timeout_s=0.15)
    keys = chain(1, 4)
    rig.preload(keys)
    gate = rig.store.plan["get"] = Gate()
    handle = rig.tier.prefetch(keys)
    count, seconds = timed(handle.wait)
    assert count == 0
    assert 0.1 < seconds < 0.15 + PROMPT_S
    assert handle.reason == "timeout"
    gate.open()
    rig.idle()
    assert rig.tier.prefetch(keys).wait() == 4


def test_21_more_than_the_read_queue_is_declined(rig):
    rig = rig(read_queue_pages=8)
    rig.store.plan["match_prefix"] = Gate()
    first = rig.tier.prefetch(chain(1, 6))
    second = rig.tier.prefetch(chain(2, 6))
    assert not first.done
    assert second.reason == "read_queue_full"
    first.cancel()


def test_21_write_back_over_a_dead_store_gives_up_pages_not_service(rig):
    rig = rig(policy="write_back", host_pages=16, deadline_s=0.1, probe_interval_s=30.0)
    rig.store.plan["put"] = Gate()
    worst = 0.0
    for seed in range(30):
        _, seconds = timed(lambda seed=seed: rig.insert(chain(seed, 6)))
        worst = max(worst, seconds)
        time.sleep(0.01)
    assert worst < PROMPT_S
    assert rig.load(chain(29, 6)) == 6, "new pages find room"
    assert rig.account()["evictions"]["pages"]["unsaved"] > 0
    report, seconds = timed(lambda: rig.tier.close(1.0))
    assert seconds < 1.0 + PROMPT_S
    assert report.unsaved_pages > 0
    assert not report.clean


def test_21_a_direction_without_a_thread_left_declines_at_once(rig):
    rig = rig(deadline_s=0.05, probe_interval_s=0.01, max_stuck_threads=1, prefetch="wait_complete")
    stored = chain(1, 4)
    rig.preload(stored)
    gate = rig.store.plan["get"] = Gate()
    for _ in range(2):
        rig.tier.prefetch(stored[:2]).wait()
        time.sleep(0.05)
    rig.until(lambda s: s["lanes"]["reads"]["late_calls"] == 2)
    time.sleep(0.1)
    handle = rig.tier.prefetch(stored)
    assert handle.reason == "breaker_open"
    assert rig.tier.match(stored).store_pages == 0
    gate.open()
    rig.until(lambda s: s["lanes"]["reads"]["threads"] == 1)
    time.sleep(0.05)
    assert rig.tier.prefetch(stored).wait() == 4
