"""What a tier got wrong once: closed twice, chained in a ring, taken for idle by its store."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from hicache_tier import open_store
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.testing.faults import Gate
from hicache_tier.testing.memory_store import MemoryStore
from hicache_tier.testing.tier_rig import GEOMETRY, Rig, chain
from hicache_tier.tier.shutdown import Shutdown


class Telling(MemoryStore):
    """A store that can be told of uses, and asked."""

    def __init__(self):
        super().__init__(GEOMETRY, "page_first")
        self.told = []

    def touch(self, keys):
        self._begin("touch", keys)
        self.told.append(list(keys))
        return [key in self.pages for key in keys]

    def contains(self, keys):
        self._begin("contains", keys)
        return [key in self.pages for key in keys]


@pytest.fixture
def telling():
    made = []

    def make(**options):
        made.append(Rig(Telling(), **options))
        return made[-1]

    yield make
    for each in made:
        for plan in each.store.plan.values():
            plan.open()
        each.tier.close(5)
        each.until(lambda stats: stats["host"]["free_pages"] == stats["host"]["total_pages"])
        each.host.close()


@pytest.fixture
def real(tmp_path):
    made = []

    def make(**options):
        store = open_store(tmp_path / "s", GEOMETRY, "page_first", model="m", capacity_bytes=300 << 10)
        made.append(Rig(store, **options))
        return made[-1]

    yield make
    for each in made:
        each.tier.close(5)
        each.store.close()
        each.host.close()


def test_calls_of_close_at_one_time_give_one_report(rig):
    rig = rig(deadline_s=5.0)
    gate = rig.store.plan["put"] = Gate()
    rig.insert(chain(1, 3))
    gate.wait_for(1)
    reports = []

    def close(timeout_s):
        reports.append(rig.tier.close(timeout_s))

    calls = [threading.Thread(target=close, args=(timeout_s,)) for timeout_s in (1.0, 3.0, 3.0)]
    for call in calls:
        call.start()
        time.sleep(0.05)
    begun = time.monotonic()
    early = rig.tier.close(0.1)  # it cannot wait for the others
    assert time.monotonic() - begun < 0.6
    assert early.unsaved_pages == 3
    for call in calls:
        call.join(10)
    assert len({id(report) for report in reports}) == 1
    assert reports[0].unsaved_pages == reports[0].abandoned_pages == 3
    gate.open()
    assert rig.tier.close() is reports[0]


def test_a_close_that_was_interrupted_can_be_made_again(rig, monkeypatch):
    rig = rig()
    rig.insert(chain(1, 3))
    rig.idle()
    lane = rig.tier._core.lanes[0]
    with monkeypatch.context() as patch:
        patch.setattr(lane, "join", lambda until_s: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rig.tier.close(5)
    assert rig.tier.close(5).clean


@pytest.mark.parametrize("at", range(1, 6))
def test_a_close_that_was_interrupted_as_it_began_can_be_made_again(rig, at):
    """By a signal that raises as any call of `close` returns: taking its turn, say."""
    rig, close, returned = rig(), Shutdown.close.__code__, []

    def interrupt(frame, event, _):
        if event in {"return", "c_return"} and close in {frame.f_code, frame.f_back and frame.f_back.f_code}:
            returned.append(event)
            if len(returned) == at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sys.setprofile(interrupt)
        rig.tier.close(1)
    assert rig.tier.close(1).clean
    assert rig.tier._core.closed


def test_a_page_is_not_its_own_parent(rig):
    rig = rig(host_pages=8)
    for keys in (chain(1, 1), chain(2, 3)):
        with pytest.raises(InvalidArgumentError, match="parent"):
            rig.insert(keys, parent=keys[-1])
    assert rig.account()["host"]["owned_pages"] == 0


@pytest.mark.parametrize("length", [2, 3, 4])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_ring_of_parents_does_not_fill_the_host_tier_for_good(rig, length, policy):
    rig = rig(host_pages=4, policy=policy)
    for seed in (1, 2, 3):
        keys = chain(seed, length)
        for at, key in enumerate(keys):
            rig.insert([key], parent=keys[(at + 1) % length])
        rig.tier.flush(5)
    keys = chain(9, 4)
    assert rig.insert(keys) == 4
    assert rig.load(keys) >= 3  # with write_back one page is kept free


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_what_is_hot_in_the_host_tier_stays_in_the_store(real, policy):
    rig = real(policy=policy)
    hot = chain(1, 4)
    rig.insert(hot)
    assert rig.load(hot) == 4
    assert rig.tier.flush(5) == 0
    for turn in range(60):
        for _ in range(2):  # twice is what the selective policy stores
            rig.insert(chain(100 + turn, 4))
        assert rig.load(hot) == 4
        assert rig.tier.flush(5) == 0
    assert rig.store.stats()["evictions"] > 0
    assert rig.store.match_prefix(hot) == 4


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_flush_and_close_ask_whether_stored_pages_are_still_there(telling, policy):
    rig = telling(policy=policy)
    keys = chain(1, 4)
    rig.insert(keys)
    assert rig.tier.flush(5) == 0
    rig.store.pages.clear()
    assert rig.tier.flush(5) == 0
    assert rig.check_stored(keys) == [True] * 4
    rig.store.pages.pop(keys[2])
    assert rig.tier.close(5).clean
    assert rig.check_stored(keys) == [True] * 4


def test_flush_says_what_the_store_does_not_keep(telling):
    rig = telling()
    keys = chain(1, 4)
    rig.insert(keys)
    rig.idle()
    rig.store.contains = lambda asked: [key != keys[3] for key in asked]
    rig.tier._writer._contains = rig.store.contains
    assert rig.tier.flush(5) == 1


def test_a_page_in_use_that_the_store_evicted_is_written_again(telling):
    rig = telling()
    keys = chain(1, 4)
    rig.insert(keys)
    rig.idle()
    rig.store.pages.pop(keys[3])
    assert rig.load(keys) == 4
    rig.until(lambda stats: stats["writes"].get("lost_pages") == 1, 5)
    rig.until(lambda _: keys[3] in rig.store.pages)


def test_uses_are_told_once_before_the_next_write_the_last_run_first(telling):
    rig = telling()
    trunk, other = chain(1, 3), chain(2, 2)
    rig.insert(trunk)
    rig.insert(other)
    rig.idle()
    rig.until(lambda _: not rig.tier._writer._uses._runs, 5)
    rig.store.told.clear()
    for _ in range(50):
        rig.load(other)
        rig.load(trunk)
    rig.insert(chain(3, 1))
    rig.tier.flush(5)
    assert rig.store.told == [trunk + other]


def test_questions_to_a_store_that_hangs_end_with_the_deadline(telling):
    rig = telling(deadline_s=0.2, probe_interval_s=0.1)
    keys = chain(1, 4)
    rig.insert(keys)
    rig.idle()
    gate = rig.store.plan["contains"] = Gate()
    begun = time.monotonic()
    rig.tier.flush(2)
    assert time.monotonic() - begun < 4
    gate.open()
    assert rig.tier.close(5).unsaved_pages == 0


def test_a_store_that_answers_nonsense_is_believed_as_before(telling):
    rig = telling()
    keys = chain(1, 4)
    rig.insert(keys)
    rig.idle()
    rig.tier._writer._contains = lambda asked: [False]
    rig.tier._writer._uses._touch = lambda asked: None
    assert rig.load(keys) == 4
    assert rig.tier.flush(5) == 0
    assert rig.tier.stats()["writes"]["failed"]["ValueError"] >= 1
