"""Faults of the store and of the process; numbers are the kinds of the fault list that the tier answers."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from pathlib import Path

import pytest

import hicache_tier
import hicache_tier_storage
from hicache_tier import open_store
from hicache_tier.errors import ClosedError
from hicache_tier.testing.faults import Gate
from hicache_tier.testing.memory_store import MemoryStore
from hicache_tier.testing.tier_rig import GEOMETRY, Rig, chain

PROMPT_S = 0.5  # what "at once" means on a busy machine


def timed(call):
    start = time.monotonic()
    result = call()
    return result, time.monotonic() - start


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def raiser(error):
    def plan(keys):
        raise error

    return plan


def test_15_a_failure_in_the_middle_keeps_the_pages_before_it(rig):
    rig = rig(prefetch="wait_complete", batch_pages=4)
    keys = chain(1, 12)
    rig.preload(keys)
    rig.store.refuse[keys[6]] = "io_error: bad sector 7"
    assert rig.tier.match(keys).store_pages == 12
    handle = rig.tier.prefetch(keys)
    assert handle.wait() == 6
    assert handle.reason == "miss"
    assert rig.load(keys) == 6
    stats = rig.idle()
    assert stats["reads"]["failed_pages"] == {"after_a_miss": 1, "io_error": 1}
    assert stats["host"]["ready_pages"] == 6


def test_15_a_put_that_fails_in_the_middle_counts_each_page(rig):
    rig = rig()
    keys = chain(1, 8)
    rig.store.refuse[keys[3]] = "disk_full"
    assert rig.insert(keys) == 8
    assert rig.tier.flush(5) == 1
    stats = rig.idle()
    assert stats["writes"]["stored_pages"] == 7
    assert set(stats["writes"]["failed_pages"]) == {"disk_full"}
    rig.store.refuse.clear()
    assert rig.tier.flush(5) == 0, "a later flush repairs it"
    assert rig.check_stored(keys) == [True] * 8


def test_16_yes_and_then_gone_is_a_miss_from_there_on(rig):
    rig = rig(prefetch="wait_complete")
    keys = chain(1, 8)
    rig.preload(keys[:5])
    rig.store.claims = set(keys)
    assert rig.tier.match(keys).store_pages == 8
    assert rig.tier.prefetch(keys).wait() == 5
    assert rig.load(keys) == 5
    assert rig.account()["prefetch"]["missing_pages"] == {"miss": 3}


@pytest.mark.parametrize("resets", [False, True])
def test_18_threads_on_one_tier(any_rig, resets):
    rig = any_rig(
        host_pages=24, prefetch="timeout", prefetch_timeout_s=2.0, batch_pages=4, lookup_timeout_s=2.0
    )
    keys = chain(1, 12)
    rig.compute(keys)
    problems = []

    def work(seed):
        try:
            mine = Rig.__new__(Rig)
            mine.__dict__.update(rig.__dict__)
            mine.scratch = type(rig.device).empty(GEOMETRY, 16)
            for turn in range(25):
                length = 1 + (seed * 7 + turn * 5) % len(keys)
                if (seed + turn) % 3 == 0:
                    rig.tier.insert(keys[:length], rig.device, range(length))
                elif (seed + turn) % 3 == 1:
                    rig.tier.prefetch(keys[:length]).wait()
                elif resets and seed == 3:
                    rig.tier.reset()
                rig.tier.match(keys[:length])
                with rig.tier.lock(keys[:length]) as lock:
                    loaded = mine.load(keys[:length])
                    assert resets or loaded >= lock.pages
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems
    rig.idle()
    rig.check_stored(keys)


@pytest.mark.parametrize("end", ["reset", "evict", "close"])
def test_19_a_page_stays_owned_until_the_store_has_let_go(rig, end):
    rig = rig(host_pages=8)
    gate = rig.store.plan["put"] = Gate()
    keys = chain(1, 4)
    rig.insert(keys)
    gate.wait_for(1)
    if end == "close":
        report = rig.tier.close(0.3)
        assert report.abandoned_calls == ("writes",)
        assert (report.abandoned_pages, report.unsaved_pages) == (4, 4)
    elif end == "reset":
        rig.tier.reset()
        assert rig.account()["host"]["detached_pages"] == 4
    if end != "close":
        for seed in range(2, 6):  # pressure that would reuse the pages if it could
            assert rig.insert(chain(seed, 8)) == 4
    assert rig.host.free_pages <= 4
    gate.open()
    rig.until(lambda s: s["queues"]["write_in_flight_pages"] == 0)
    assert rig.check_stored(keys) == [True] * 4, "what is stored is what was submitted"
    if end == "close":
        rig.until(lambda s: s["host"]["free_pages"] == 8)


@pytest.mark.parametrize("end", ["cancel", "reset", "close"])
def test_19_a_cancelled_read_keeps_its_pages_until_it_returns(rig, end):
    rig = rig(host_pages=8, batch_pages=4)
    keys = chain(1, 8)
    rig.preload(keys)
    gate = rig.store.plan["get"] = Gate()
    handle = rig.tier.prefetch(keys)
    gate.wait_for(1)
    if end == "cancel":
        assert handle.cancel() == 0
        assert handle.reason == "cancelled"
    elif end == "reset":
        rig.tier.reset()
        assert handle.reason == "reset"
    else:
        report = rig.tier.close(0.3)
        assert report.abandoned_pages == 4
        assert handle.reason == "closed"
    assert handle.done
    assert rig.account()["host"]["owned_pages"] == 4
    if end != "close":
        assert rig.insert(chain(2, 8)) == 4
    gate.open()
    stats = rig.until(lambda s: not s["lanes"]["reads"]["calls_in_flight"])
    assert stats["host"]["detached_pages"] == 0
    if end == "cancel":
        assert rig.load(keys) == 4, "what arrived after all is good"
    if end == "close":
        assert rig.host.free_pages == 8


def test_20_double_release_and_unknown_states_never_free_twice(rig):
    rig = rig(host_pages=4)
    keys = chain(1, 4)
    rig.insert(keys)
    rig.idle()  # a page on its way to the store stays owned until it is there
    locks = [rig.tier.lock(keys[: i + 1]) for i in range(4)]
    rig.tier.reset()
    assert rig.account()["host"]["detached_pages"] == 4
    for lock in locks:
        lock.release()
        lock.release()
        rig.tier.unlock(lock)
    assert rig.account()["host"]["free_pages"] == 4


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
    assert rig.tier.stats()["lanes"]["reads"]["threads"] == 0


def test_21_pages_of_a_read_that_an_engine_gave_up_are_never_lent_again():
    """Its bytes may still arrive: the next owner of the page would get them."""
    rig = Rig(MemoryStore(GEOMETRY, "page_first"), prefetch="wait_complete")
    keys = chain(0, 4)
    rig.preload(keys)
    rig.store.refuse[keys[2]] = "timeout: no end after 60 s"
    assert rig.tier.prefetch(keys).wait() == 2
    stats = rig.idle()
    assert stats["host"]["kept_after_timeout"] == 1
    assert stats["host"]["owned_pages"] == 3
    assert rig.tier.close(5).abandoned_pages == 1
    rig.host.close()


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


def test_22_a_copy_that_fails_costs_nothing_but_the_pages(rig, monkeypatch):
    rig = rig()
    keys = chain(1, 4)

    def broken(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr("hicache_tier.tier.copies.backup", broken)
        assert rig.insert(keys) == 0
    stats = rig.account()
    assert stats["host"]["free_pages"] == 16
    assert stats["backup"]["failed_pages"] == {"RuntimeError": 4}
    rig.insert(keys)
    with monkeypatch.context() as patch:
        patch.setattr("hicache_tier.tier.copies.load", broken)
        assert rig.tier.load(keys, rig.scratch, range(4)) == 0
    assert rig.load(keys) == 4
    rig.idle()
    assert rig.insert(chain(2, 16)) == 16


def test_22_a_copy_that_does_not_end_keeps_its_pages(rig, monkeypatch):
    class Never:
        nbytes = 0

        def wait(self, timeout):
            raise TimeoutError

    rig = Rig(MemoryStore(GEOMETRY, "page_first"), host_pages=8)
    with monkeypatch.context() as patch:
        patch.setattr("hicache_tier.tier.copies.backup", lambda *args: Never())
        assert rig.insert(chain(1, 4)) == 0
    assert rig.account()["host"]["detached_pages"] == 4
    assert rig.insert(chain(2, 8)) == 4
    assert rig.tier.close(5).abandoned_pages == 4
    assert rig.host.owned_pages == 4
    rig.host.close()


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


def test_24_a_forked_child_is_told_so_and_harms_nobody(rig):
    rig = rig()
    keys = chain(1, 4)
    rig.insert(keys)
    lock = rig.tier.lock(keys)
    handle = rig.tier.prefetch(chain(2, 2))
    calls = [
        lambda: rig.tier.match(keys),
        lambda: rig.insert(keys),
        lambda: rig.tier.prefetch(keys),
        lambda: rig.tier.load(keys, rig.scratch, range(4)),
        rig.tier.stats,
        rig.tier.reset,
        rig.tier.flush,
        handle.wait,
        handle.cancel,
        lambda: handle.done,
        lambda: rig.tier.lock(keys),
    ]
    with rig.tier._core.lock, warnings.catch_warnings():  # the worst moment: the lock is taken in the parent
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                told = 0
                for call in calls:
                    try:
                        call()
                    except ClosedError as error:
                        told += "forked" in str(error)
                lock.release()
                code = 0 if told == len(calls) and rig.tier.close(1).clean else 2
            finally:
                os._exit(code)
    end = time.monotonic() + 10
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        assert time.monotonic() < end, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0
    lock.release()
    assert rig.load(keys) == 4


def _spawned(root, queue):
    with open_store(root, GEOMETRY, "page_first", model="m", capacity_bytes="4 MiB") as store:
        rig = Rig(store, prefetch="wait_complete")
        found = rig.tier.match(chain(1, 4)).store_pages
        rig.tier.prefetch(chain(1, 4)).wait()
        queue.put((found, rig.load(chain(1, 4)), rig.tier.close(5).clean))


@pytest.mark.slow
def test_24_a_spawned_process_reads_the_same_store(tmp_path):
    with open_store(tmp_path / "store", GEOMETRY, "page_first", model="m", capacity_bytes="4 MiB") as store:
        rig = Rig(store)
        rig.insert(chain(1, 4))
        assert rig.tier.flush(5) == 0, rig.tier.stats()
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=_spawned, args=(tmp_path / "store", queue))
        process.start()
        assert queue.get(timeout=60) == (4, 4, True)
        process.join(10)
        rig.tier.close(5)


def test_the_host_pool_closed_under_a_tier_is_no_crash():
    rig = Rig(MemoryStore(GEOMETRY, "page_first"))
    gate = rig.store.plan["put"] = Gate()
    rig.insert(chain(1, 4))
    gate.wait_for(1)
    assert rig.host.close(0.05) is False, "the store still reads it"
    gate.open()
    with pytest.raises(ClosedError):
        rig.insert(chain(2, 4))
    report = rig.tier.close(2)
    assert report.abandoned_calls == ()
    assert rig.tier.stats()["host"]["not_freed"] == {"closed": 4}


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


def test_25_ranks_may_disagree_and_the_tier_decides_nothing_for_all():
    """Hits 8, 5, 8, 8: each rank says what it has, and the engine takes the least."""
    keys, hits = chain(1, 8), [8, 5, 8, 8]
    rigs = [Rig(MemoryStore(GEOMETRY, "page_first"), prefetch="wait_complete") for _ in hits]
    for rig, count in zip(rigs, hits, strict=True):
        rig.preload(keys[:count])
    found = [rig.tier.match(keys) for rig in rigs]
    assert [match.pages for match in found] == hits
    assert all(type(match.pages) is int for match in found)
    arrived = [rig.tier.prefetch(keys).wait() for rig in rigs]
    assert arrived == hits
    least = min(arrived)  # an all-reduce, which is the engine's business
    assert [rig.load(keys[:least]) for rig in rigs] == [5] * 4
    rigs[3].tier.reset()  # one rank loses everything between the decision and the copy
    assert [rig.load(keys[:least]) for rig in rigs] == [5, 5, 5, 0]
    for rig in rigs:
        rig.tier.close(5)
        rig.host.close()


def test_25_nothing_of_ours_talks_to_other_ranks():
    roots = [Path(module.__file__).parent for module in (hicache_tier, hicache_tier_storage)]
    sources = [path for root in roots for path in root.rglob("*.py") if "testing" not in path.parts]
    assert len(sources) > 150
    # SGLang leaves it to a linker to have the ranks agree, over groups that SGLang made.
    assert [path.name for path in sources if "torch.distributed" in path.read_text()] == ["linker.py"]
