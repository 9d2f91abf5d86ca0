"""The tier's main flows, over the memory store and over the real one."""

from __future__ import annotations

import pytest
import torch

from hicache_tier import DevicePool, HostPool, KVGeometry, Tier, UnsupportedTransferError
from hicache_tier.errors import ClosedError, InvalidArgumentError
from hicache_tier.testing.faults import Gate
from hicache_tier.testing.memory_store import MemoryStore
from hicache_tier.testing.tier_rig import GEOMETRY, Rig, chain
from hicache_tier.tier.breaker import Breaker


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_round_trip_through_the_store(any_rig, layout):
    rig = any_rig(layout=layout, prefetch="wait_complete", batch_pages=3)
    keys = chain(1, 8)
    assert rig.tier.match(keys).pages == 0
    assert rig.insert(keys) == 8
    assert rig.tier.flush(5) == 0, rig.tier.stats()
    assert rig.check_stored(keys) == [True] * 8
    rig.tier.reset()
    assert rig.load(keys) == 0
    match = rig.tier.match(keys + chain(2, 2))
    assert (match.host_pages, match.store_pages) == (0, 8)
    handle = rig.tier.prefetch(keys)
    assert handle.wait() == 8 == handle.result
    assert handle.done
    assert handle.reason is None
    assert rig.tier.match(keys).host_pages == 8
    assert rig.load(keys) == 8
    stats = rig.idle()
    assert stats["writes"]["stored_pages"] == 8
    assert stats["writes"]["bytes"] == 8 * GEOMETRY.page_nbytes == stats["reads"]["bytes"]
    assert stats["reads"]["loaded_pages"] == 8
    assert stats["backup"]["pages"] == 8 == stats["load"]["pages"]


def test_a_second_tier_over_the_same_store_finds_the_pages(any_rig):
    rig = any_rig(prefetch="wait_complete")
    keys = chain(1, 6)
    rig.insert(keys)
    rig.tier.flush(5)
    other = Rig(rig.store, prefetch="timeout", prefetch_timeout_s=5.0)
    assert other.tier.match(keys).store_pages == 6
    assert other.tier.prefetch(keys).wait() == 6
    assert other.load(keys) == 6
    assert other.tier.close(5).clean
    other.host.close()


def test_write_back_stores_what_leaves(any_rig):
    rig = any_rig(policy="write_back", host_pages=16, write_back_reserve_pages=4)
    first, second = chain(1, 10), chain(2, 8)
    assert rig.insert(first) == 10
    assert rig.check_stored(first) == [False] * 10
    assert rig.insert(second[:6]) == 6
    rig.idle()
    stored = rig.check_stored(first)
    assert stored.count(True) == 4
    assert stored == sorted(stored), "leaves leave before heads"
    assert rig.insert(second) == 8
    assert rig.tier.flush(5) == 0, rig.tier.stats()
    assert rig.check_stored(second) == [True] * 8
    assert rig.check_stored(first) == [True] * 10


def test_write_back_saves_at_close(any_rig):
    rig = any_rig(policy="write_back")
    keys = chain(1, 5)
    rig.insert(keys)
    assert rig.tier.close(5).clean
    assert rig.check_stored(keys) == [True] * 5


def test_selective_writes_after_hits(any_rig):
    rig = any_rig(policy="write_through_selective", hits_to_store=2)
    keys = chain(1, 6)
    rig.insert(keys)
    assert rig.tier.flush(5) == 0, rig.tier.stats()
    assert rig.check_stored(keys) == [False] * 6
    assert rig.load(keys[:2]) == 2
    assert rig.insert(keys[:4]) == 4
    assert rig.tier.flush(5) == 0, rig.tier.stats()
    assert rig.check_stored(keys) == [True] * 4 + [False] * 2


def test_decoding_goes_on_from_a_parent(rig):
    rig = rig(host_pages=8)
    keys = chain(1, 6)
    rig.insert(keys[:4])
    assert rig.insert(keys[4:], parent=keys[3]) == 2
    rig.idle()
    assert rig.insert(chain(2, 6)) == 6
    assert rig.tier.match(keys).host_pages == 2, "leaves go before heads, though they were used later"


def test_load_one_layer_at_a_time(rig):
    rig = rig()
    keys = chain(1, 3)
    rig.insert(keys)
    with rig.tier.lock(keys) as lock:
        assert lock.pages == 3
        for layer in range(2):
            assert rig.tier.load(keys, rig.scratch, range(3), layer=layer) == 3
    rig.check(rig.scratch, keys, 3)


def test_eviction_takes_leaves_first_and_spares_the_locked(rig):
    rig = rig(host_pages=8)
    first, second, third = chain(1, 4), chain(2, 4), chain(3, 4)
    rig.insert(first)
    rig.insert(second)
    rig.idle()
    lock = rig.tier.lock(first)
    assert rig.insert(third[:2]) == 2
    assert rig.tier.match(second).host_pages == 2
    assert rig.tier.match(first).host_pages == 4
    assert rig.insert(third) == 4
    rig.idle()
    assert rig.insert(chain(4, 6)) == 4, "what is locked leaves no more room"
    assert rig.account()["inserts"]["skipped_pages"] == {"host_full": 2}
    assert rig.load(first) == 4
    rig.tier.unlock(lock)
    lock.release()
    rig.idle()
    assert rig.insert(chain(5, 8)) == 8
    assert rig.account()["host"]["ready_pages"] == 8


def test_an_insertion_never_evicts_its_own_prefix(rig):
    rig = rig(host_pages=4)
    keys = chain(1, 10)
    assert rig.insert(keys) == 4
    assert rig.insert(keys) == 4
    assert rig.load(keys) == 4


def test_a_hole_in_the_host_is_filled_from_the_store(rig):
    """Fault kind 15: the usable prefix is consecutive, whatever lies where."""
    rig = rig(prefetch="wait_complete", policy="write_through_selective", hits_to_store=9)
    keys = chain(1, 6)
    rig.preload(keys[2:4])
    rig.insert(keys[4:], parent=keys[3])
    rig.insert(keys[:2])
    match = rig.tier.match(keys)
    assert (match.host_pages, match.store_pages) == (2, 4)
    assert rig.load(keys) == 2
    assert rig.tier.prefetch(keys).wait() == 6
    assert rig.load(keys) == 6
    assert rig.account()["reads"]["loaded_pages"] == 2


def test_two_prefetches_of_the_same_pages_read_them_once(rig):
    rig = rig(prefetch="wait_complete", batch_pages=2)
    keys = chain(1, 8)
    rig.preload(keys)
    handles = [rig.tier.prefetch(keys), rig.tier.prefetch(keys[:6])]
    assert [handle.wait() for handle in handles] == [8, 6]
    assert rig.idle()["reads"]["loaded_pages"] == 8


def test_prefetch_of_what_is_not_there_evicts_nothing(rig):
    rig = rig(host_pages=8, prefetch="wait_complete")
    keys = chain(1, 8)
    rig.insert(keys)
    rig.idle()
    handle = rig.tier.prefetch(chain(2, 8))
    assert handle.wait() == 0
    assert handle.reason == "absent"
    assert rig.tier.match(keys).host_pages == 8


def test_prefetch_beyond_the_room_brings_the_head(rig):
    rig = rig(host_pages=8, prefetch="wait_complete", read_queue_pages=64)
    keys = chain(1, 12)
    rig.preload(keys)
    handle = rig.tier.prefetch(keys)
    assert handle.wait() == 8
    assert handle.reason == "host_full"
    assert rig.load(keys) == 8


def test_keys_as_hex_text(rig):
    rig = rig()
    keys = chain(1, 3)
    assert rig.insert(keys) == 3
    assert rig.tier.match([key.hex() for key in keys]).host_pages == 3


def test_wrong_calls_are_refused_and_change_nothing(rig):
    rig = rig()
    keys = chain(1, 3)
    pages = rig.compute(keys)
    wrong = DevicePool.empty(
        KVGeometry.mha(num_layers=3, num_kv_heads=2, head_dim=4, dtype="int8", page_tokens=2), 8
    )
    calls = [
        lambda: rig.tier.insert(keys, rig.device, [0, 1]),
        lambda: rig.tier.insert(keys, rig.device, [0, 1, 64]),
        lambda: rig.tier.insert(keys, rig.device, [0, 1, -1]),
        lambda: rig.tier.insert(keys, rig.device, [0.0, 1.0, 2.0]),
        lambda: rig.tier.insert(keys, rig.device, torch.zeros((3, 1), dtype=torch.int64)),
        lambda: rig.tier.insert(keys, wrong, pages),
        lambda: rig.tier.insert(keys, None, pages),
        lambda: rig.tier.insert([keys[0], keys[0]], rig.device, [0, 1]),
        lambda: rig.tier.insert(["zz"], rig.device, [0]),
        lambda: rig.tier.insert(keys[0], rig.device, [0]),
        lambda: rig.tier.match([b""]),
        lambda: rig.tier.prefetch([3]),
        lambda: rig.tier.lock("abc"),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError):
            call()
        assert rig.account()["host"]["free_pages"] == 16
    assert rig.insert(keys) == 3
    with pytest.raises(InvalidArgumentError):
        rig.tier.load(keys, rig.device, [0, 1, 64])
    with pytest.raises(InvalidArgumentError):
        rig.tier.load(keys, rig.device, [0, 1, 2], layer=7)
    rig.idle()
    assert rig.insert(chain(2, 16)) == 16, "nothing stayed pinned"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "write_trough"}, "write_through"),
        ({"prefetch": "best"}, "best_effort"),
        ({"polices": 1}, "policy"),
        ({"write_queue_pages": 0}, "write_queue_pages"),
        ({"batch_pages": True}, "batch_pages"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"probe_interval_s": 0}, "probe_interval_s must be above 0 s"),
        ({"probe_interval_s": -1.0}, "probe_interval_s must be above 0 s"),
        ({"probe_interval_s": float("nan")}, "probe_interval_s must be a finite number"),
        ({"lookup_timeout_s": "1"}, "lookup_timeout_s"),
        ({"write_back_reserve_pages": 8}, "write_back_reserve_pages"),
        ({"sharded": "yes"}, "sharded"),
    ],
)
def test_wrong_options_are_refused_by_name(options, says):
    with HostPool(GEOMETRY, "page_first", 8, pinned=False) as host:
        with pytest.raises(InvalidArgumentError) as caught:
            Tier(host, MemoryStore(GEOMETRY, "page_first"), **options)
        assert says in str(caught.value)


def test_configurations_that_cannot_work_are_refused():
    other = KVGeometry.mha(num_layers=2, num_kv_heads=4, head_dim=2, dtype="int8", page_tokens=2)
    with HostPool(GEOMETRY, "page_first", 8, pinned=False) as host:
        with pytest.raises(InvalidArgumentError, match="geometry"):
            Tier(host, MemoryStore(other, "page_first"))
        with pytest.raises(InvalidArgumentError, match="order of axes"):
            Tier(host, MemoryStore(GEOMETRY, "page_head"))
        with pytest.raises(UnsupportedTransferError, match="Layer-sharded"):
            Tier(host, MemoryStore(GEOMETRY, "page_first"), io_backend="direct", sharded=True)
        with pytest.raises(UnsupportedTransferError):
            Tier(host, MemoryStore(GEOMETRY, "page_first"), io_backend="kernal")
        with pytest.raises(InvalidArgumentError, match="HostPool"):
            Tier(None, MemoryStore(GEOMETRY, "page_first"))
        assert host.owned_pages == 0


def test_a_closed_tier_says_so(rig):
    rig = rig()
    keys = chain(1, 3)
    rig.insert(keys)
    handle = rig.tier.prefetch(keys)
    report = rig.tier.close(5)
    assert report.clean
    assert rig.tier.close(5) is report
    assert handle.wait() == 3
    for call in (
        lambda: rig.insert(keys),
        lambda: rig.tier.match(keys),
        lambda: rig.tier.prefetch(keys),
        lambda: rig.tier.lock(keys),
        rig.tier.reset,
        rig.tier.flush,
        lambda: rig.tier.load(keys, rig.device, range(3)),
    ):
        with pytest.raises(ClosedError):
            call()
    assert rig.account()["host"]["free_pages"] == 16


def test_a_page_on_its_way_out_stays_where_it_is_used_again(rig):
    rig = rig(policy="write_back", host_pages=16, write_back_reserve_pages=4)
    gate = rig.store.plan["put"] = Gate()
    keys = chain(1, 15)
    assert rig.insert(keys) == 15
    gate.wait_for(1)
    assert rig.load(keys) == 15
    gate.open()
    assert rig.idle()["writes"]["stored_pages"] == 3
    assert rig.tier.match(keys).host_pages == 15


def test_a_breaker_probes_ever_more_rarely_and_closes_on_success():
    breaker = Breaker(1.0)
    assert breaker.allow(0.0)
    waits = []
    now = 10.0
    for _ in range(8):
        breaker.trip(now)
        assert not breaker.allow(now + 0.99)
        waits.append(breaker.retry_in_s(now))
        now += waits[-1]
        assert breaker.allow(now)
        assert not breaker.allow(now), "one probe an interval"
    assert waits == [1, 2, 4, 8, 16, 32, 32, 32]
    breaker.succeed(now - 100)
    assert breaker.is_open, "a call from before the trip proves nothing"
    breaker.succeed(now)
    assert not breaker.is_open
    assert breaker.allow(now)
    assert breaker.times_opened == 1
