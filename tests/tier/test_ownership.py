"""Who owns a host page, whatever fails or hangs with it; numbers are the kinds of the fault list."""

from __future__ import annotations

import pytest

from hicache_tier.errors import ClosedError
from hicache_tier.testing.faults import Gate
from hicache_tier.testing.memory_store import MemoryStore
from hicache_tier.testing.tier_rig import GEOMETRY, Rig, chain


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
