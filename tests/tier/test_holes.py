"""Pages that fail, or are gone, in the middle of a prefix; numbers are the kinds of the fault list."""

from __future__ import annotations

from hicache_tier.testing.tier_rig import chain


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
