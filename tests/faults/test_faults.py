"""The faults that ship: each does what it says, to engines and to stores, and nothing else changes."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.testing.array_pool import ArrayPool, blank_pages, fill_pages, keys_of, pages_equal
from hicache_tier.testing.engine import Bench, ByteEngineSuite, HookLog, Memory
from hicache_tier.testing.faults import (
    Delay,
    Fail,
    FailPages,
    FaultyEngine,
    FaultyStore,
    FlipBits,
    ForgetVerdicts,
    Hang,
    LoseUnsynced,
    OutOfSpace,
    ReturnShort,
    TearWrites,
    coming_in,
    every,
    going_out,
    on_call,
    verbs,
)
from hicache_tier.testing.store import PageStoreSuite
from hicache_tier.testing.store_rig import GEOMETRY, PAGE_NBYTES
from hicache_tier_storage import open_store
from hicache_tier_storage.posix import PosixEngine

PAGES = 8


def posix():
    return PosixEngine(direct=False, threads=2)


class TestAnEngineWithFaultsThatRest(ByteEngineSuite):
    def make_engine(self, directory):
        return FaultyEngine(posix(), Fail("never", on_call(10**9)), Delay(0.0), LoseUnsynced())


class TestAStoreWithFaultsThatRest(PageStoreSuite):
    def open_store(self, root):
        room = 256 * max(8192, self.geometry.page_nbytes)
        store = open_store(root, self.geometry, self.layout, capacity_bytes=room, io_mode="buffered")
        return FaultyStore(store, Fail("never", on_call(10**9)), Delay(0.0))


class EngineRig:
    """Pages in memory and slots of a slab, moved by an engine with faults."""

    def __init__(self, folder, faults):
        self.bench = Bench(folder, [3000, 1096], slots=PAGES)
        self.slab = self.bench.slab()
        self.engine = FaultyEngine(posix(), *faults)

    def memory(self, seed=0, *, filled=True):
        memory = Memory([3000, 1096], PAGES, between=16, seed=seed)
        if filled:
            memory.fill()
        return memory

    def batch(self, memory):
        return self.bench.batch(memory, [(self.slab, slot) for slot in range(PAGES)])

    def write(self, seed=0):
        memory = self.memory(seed)
        return memory, self.engine.write(self.batch(memory))

    def on_disk(self, slot):
        return self.bench.on_disk(self.slab, slot)


@pytest.fixture
def engine(tmp_path):
    rigs = []

    def make(*faults):
        rigs.append(EngineRig(tmp_path, faults))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.engine.close()
        rig.bench.close()


@pytest.fixture
def store(tmp_path):
    """A store with faults, a pool with the pages of its keys, and the keys."""
    stores = []

    def make(*faults):
        opened = open_store(
            tmp_path / "root", GEOMETRY, "page_first", capacity_bytes="2 MiB", io_mode="buffered"
        )
        stores.append(opened)
        host, keys = ArrayPool(GEOMETRY, "page_first", PAGES), keys_of("faults", PAGES)
        fill_pages(host, range(PAGES), keys, PAGE_NBYTES)
        return FaultyStore(opened, *faults), host, keys

    yield make
    for opened in stores:
        opened.close()


def timed(call):
    started = time.monotonic()
    return call(), time.monotonic() - started


def reasons(statuses):
    return [status.kind for status in statuses]


def test_delay(engine, store):
    rig = engine(Delay(0.15, going_out))
    (memory, verdicts), took = timed(rig.write)
    assert not any(verdicts)
    assert took >= 0.15
    _, took = timed(lambda: rig.engine.read(rig.batch(memory)))
    assert took < 0.15
    slow, host, keys = store(Delay(0.15, verbs("match_prefix")))
    assert all(slow.put(keys, host, range(PAGES)))
    found, took = timed(lambda: slow.match_prefix(keys))
    assert (found, took >= 0.15) == (PAGES, True)


@pytest.mark.parametrize("after", [False, True])
def test_hang(engine, after):
    hang = Hang(after=after)
    rig = engine(hang)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(rig.write()))
    thread.start()
    hang.gate.wait_for()
    assert not answers
    assert any(rig.on_disk(0)) == after
    hang.gate.open()
    thread.join(10)
    memory, verdicts = answers[0]
    assert not any(verdicts)
    assert rig.on_disk(0) == memory.page(0)
    hang.gate.close()
    hang.on = False
    assert not any(rig.write()[1])


def test_fail_on_a_call(engine, store):
    rig = engine(Fail("io_error: sector 7", on_call(2, when=going_out)), Fail(OSError("gone"), on_call(3)))
    first, verdicts = rig.write(1)
    assert not any(verdicts)
    assert rig.write(2)[1] == ["io_error: sector 7"] * PAGES
    assert rig.on_disk(3) == first.page(3)
    with pytest.raises(OSError, match="gone"):
        rig.write(3)
    assert not any(rig.write(4)[1])
    assert [fault.struck for fault in rig.engine.faults] == [1, 1]
    bad, host, keys = store(Fail("lost: x", every(2, coming_in)))
    assert all(bad.put(keys, host, range(PAGES)))
    assert all(bad.get(keys, host, range(PAGES)))
    assert reasons(bad.get(keys, host, range(PAGES))) == ["lost"] * PAGES
    assert all(bad.get(keys, host, range(PAGES)))


def test_fail_pages_by_chance_and_alike_for_a_seed(engine, store):
    patterns = []
    for seed in (1, 1, 2):
        rig = engine(FailPages("io_error", 0.5, seed=seed))
        patterns.append([rig.write()[1] for _ in range(4)])
    assert patterns[0] == patterns[1] != patterns[2]
    flat = [verdict for verdicts in patterns[0] for verdict in verdicts]
    assert set(flat) == {"", "io_error"}
    bad, host, keys = store(FailPages("odd", 1.0, going_out))
    assert reasons(bad.put(keys, host, range(PAGES))) == ["odd"] * PAGES
    assert all(bad.get(keys, host, range(PAGES)))


def test_forget_verdicts(engine, store):
    assert len(engine(ForgetVerdicts(3)).write()[1]) == PAGES - 3
    bad, host, keys = store(ForgetVerdicts())
    assert len(bad.put(keys, host, range(PAGES))) == PAGES - 1


@pytest.mark.parametrize("hooked", [False, True])
def test_flip_bits_is_seen_by_whoever_computes_checksums(engine, hooked):
    flip = FlipBits()
    rig = engine(flip)
    source, _ = rig.write()
    target = rig.memory(filled=False)
    batch = rig.batch(target)
    seen, log = {}, HookLog(PAGES)

    def hook(first, last):
        log(first, last)
        seen.update({page: target.page(page) for page in range(first, last)})

    batch.hook = hook if hooked else None
    assert not any(rig.engine.read(batch))
    assert batch.hook is (hook if hooked else None)
    assert flip.flipped == PAGES
    for page in range(PAGES):
        different = int.from_bytes(source.page(page)) ^ int.from_bytes(target.page(page))
        assert different.bit_count() == 1
        assert not hooked or seen[page] == target.page(page)
    assert log.calls == [int(hooked)] * PAGES
    assert target.between_untouched()
    assert rig.on_disk(0) == source.page(0)


def test_flip_bits_of_a_store_that_lies(store):
    lying, host, keys = store(FlipBits())
    assert all(lying.put(keys, host, range(PAGES)))
    assert all(lying.get(keys, host, range(PAGES)))
    assert not any(pages_equal(host, range(PAGES), keys, PAGE_NBYTES))


def test_return_short(engine, store):
    rig = engine(ReturnShort(3500))
    source, _ = rig.write()
    target = rig.memory(filled=False)
    assert rig.engine.read(rig.batch(target)) == ["io_error: 3500 bytes came"] * PAGES
    assert target.page(2)[:3500] == source.page(2)[:3500]
    assert target.page(2)[3500:] == b"\xc3" * 596
    assert target.between_untouched()
    short, host, keys = store(ReturnShort(1))
    assert all(short.put(keys, host, range(PAGES)))
    assert reasons(short.get(keys, host, range(PAGES))) == ["io_error"] * PAGES


def test_out_of_space(engine, store):
    full = OutOfSpace(PAGES + 2)
    rig = engine(full)
    assert not any(rig.write()[1])
    assert rig.write()[1] == [""] * 2 + ["disk_full"] * (PAGES - 2)
    assert rig.write()[1] == ["disk_full"] * PAGES
    full.room = PAGES
    assert not any(rig.write()[1])
    bad, host, keys = store(OutOfSpace())
    assert reasons(bad.put(keys, host, range(PAGES))) == ["disk_full"] * PAGES
    assert bad.match_prefix(keys) == 0


@pytest.mark.parametrize("silent", [False, True])
def test_tear_writes(engine, silent):
    tear = TearWrites(1000, on_call(2, when=going_out), silent=silent)
    rig = engine(tear)
    old, _ = rig.write(1)
    new, verdicts = rig.write(2)
    assert verdicts == ([""] if silent else ["io_error: torn"]) * PAGES
    for page in range(PAGES):
        assert rig.on_disk(page) == new.page(page)[:1000] + old.page(page)[1000:]


def test_lose_unsynced(engine):
    loss = LoseUnsynced()
    rig = engine(loss)
    old, _ = rig.write(1)
    loss.sync()
    new, _ = rig.write(2)
    rig.write(3)
    assert loss.unsynced == 2 * PAGES
    assert loss.lose() == 2 * PAGES
    assert all(rig.on_disk(page) == old.page(page) for page in range(PAGES))
    new, _ = rig.write(2)
    lost = loss.lose(0.5, seed=3)
    assert 0 < lost < PAGES
    kept = sum(rig.on_disk(page) == new.page(page) for page in range(PAGES))
    assert kept == PAGES - lost


@pytest.mark.parametrize("fault", [TearWrites(1), LoseUnsynced()])
def test_a_store_takes_no_fault_of_files(store, fault):
    with pytest.raises(InvalidArgumentError, match="FaultyEngine"):
        store(fault)


def test_faults_are_met_in_the_order_in_which_they_are_named(engine):
    """The outer one refuses, so the inner one is not met at all."""
    outer, inner = Fail("outer", on_call(1)), Fail("inner")
    rig = engine(outer, inner)
    assert [rig.write()[1][0] for _ in range(2)] == ["outer", "inner"]
    assert (outer.struck, inner.struck) == (1, 1)
    assert rig.engine.calls == {"write": 2}
    assert rig.engine.mode == "buffered"
    assert rig.engine.name == "faulty-posix"


def test_a_page_store_on_bad_hardware_serves_no_wrong_byte(tmp_path):
    """Everything at once: what is said to be loaded is right, and the rest is a miss."""
    loss = LoseUnsynced()
    engine = FaultyEngine(
        posix(),
        Delay(0.001, every(5)),
        Fail("io_error: x", every(7)),
        Fail(RuntimeError("boom"), every(11)),
        FlipBits(0.1, seed=1),
        FailPages("io_error: y", 0.1, seed=2),
        TearWrites(100, every(4, going_out), silent=True),
        loss,
    )
    options = {"capacity_bytes": "2 MiB", "engine": engine, "verify": "always"}
    host, loaded = ArrayPool(GEOMETRY, "page_first", 16), 0
    with open_store(tmp_path / "root", GEOMETRY, "page_first", **options) as store:
        for turn in range(40):
            keys = keys_of("all", 16, first=turn % 10 * 8)
            fill_pages(host, range(16), keys, PAGE_NBYTES)
            store.put(keys, host, range(16))
            if turn % 9 == 8:
                loss.lose(0.3, seed=turn)
            blank_pages(host, range(16), PAGE_NBYTES)
            statuses = store.get(keys, host, range(16))
            equal = pages_equal(host, range(16), keys, PAGE_NBYTES)
            assert all(same for same, status in zip(equal, statuses, strict=True) if status)
            loaded += sum(map(bool, statuses))
        counts = store.stats()["get"]
    assert loaded > 100
    assert {"checksum", "io_error", "engine_error"} <= set(counts)
    engine.close()
