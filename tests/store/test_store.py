"""The slab store passes the suite that ships, for every layout and kind of pool, and in every I/O mode."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_tier.errors import ClosedError
from hicache_tier.geometry import KVGeometry
from hicache_tier.layout import Layout
from hicache_tier.testing.array_pool import ArrayPool, fill_pages, pages_equal
from hicache_tier.testing.faults import Fail, Fault, FaultyEngine, ForgetVerdicts, Hang
from hicache_tier.testing.store import PageStoreSuite
from hicache_tier.testing.store_rig import GEOMETRY, PAGE_NBYTES
from hicache_tier_storage import open_store
from hicache_tier_storage.posix import PosixEngine
from hicache_tier_storage.probe import probe_posix


class Buffered(PageStoreSuite):
    io_mode = "buffered"

    def open_store(self, root):
        room = 256 * max(8192, self.geometry.page_nbytes)
        return open_store(root, self.geometry, self.layout, capacity_bytes=room, io_mode=self.io_mode)


class TestPageFirst(Buffered):
    pass


class InMemory(Buffered):
    @pytest.fixture
    def tmp_path(self, memory_path):
        return memory_path


class TestDirectIo(Buffered):
    layout = Layout.LAYER_FIRST
    geometry = KVGeometry.mha(num_layers=3, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=8)

    @pytest.fixture(autouse=True)
    def direct(self, tmp_path, monkeypatch):
        row = next(row for row in probe_posix(tmp_path) if row.mode == "direct")
        if not row.usable:
            pytest.skip(f"O_DIRECT does not work here: {row.reason}")
        monkeypatch.setattr(type(self), "io_mode", "direct")


class TestLayerFirst(InMemory):
    layout = Layout.LAYER_FIRST


class TestPageFirstDirect(InMemory):
    layout = Layout.PAGE_FIRST_DIRECT


class TestPageHead(InMemory):
    layout = Layout.PAGE_HEAD


class TestMla(InMemory):
    geometry = KVGeometry.mla(num_layers=3, latent_dim=72, dtype="float8_e4m3fn", page_tokens=4)


class TestIndexer(InMemory):
    geometry = KVGeometry.indexer(num_layers=2, bytes_per_token=132, page_tokens=8)


class TestWideK(InMemory):
    layout = Layout.LAYER_FIRST
    geometry = KVGeometry.mha(
        num_layers=2, num_kv_heads=2, head_dim=192, v_head_dim=128, dtype="float16", page_tokens=2
    )


def test_layouts_that_store_the_same_bytes_read_each_other(tmp_path, keys):
    geometry = TestPageFirst.geometry
    nbytes = geometry.page_nbytes
    for layout in ("layer_first", "page_first_direct"):
        host = ArrayPool(geometry, layout, 8)
        with open_store(tmp_path, geometry, layout, capacity_bytes="1 MiB") as store:
            if layout == "layer_first":
                fill_pages(host, range(8), keys[:8], nbytes)
                assert all(store.put(keys[:8], host, range(8)))
            else:
                assert all(store.get(keys[:8], host, range(8)))
                assert all(pages_equal(host, range(8), keys[:8], nbytes))


def test_verdicts_say_why_and_are_counted(shop, keys):
    store = shop.open()
    assert shop.put(store, keys[:2]) == ["stored", "stored"]
    assert shop.put(store, keys[:3]) == ["already_stored", "already_stored", "stored"]
    assert shop.get(store, keys[2:4]) == ["loaded", "absent"]
    assert [s.reason for s in store.delete(keys[2:4])] == ["deleted", "absent"]
    stats = store.stats()
    assert stats["put"] == {"stored": 3, "already_stored": 2}
    assert stats["get"] == {"loaded": 1, "absent": 1}
    assert stats["delete"] == {"deleted": 1, "absent": 1}
    assert stats["pages"] == len(store) == 2


def test_read_only_reads_what_others_write_and_changes_nothing(shop, keys, tmp_path):
    writer = shop.open()
    shop.put(writer, keys[:4])
    before = sorted(tmp_path.rglob("*"))
    reader = shop.open(read_only=True)
    assert shop.get(reader, keys[:5]) == ["loaded"] * 4 + ["absent"]
    for call in (lambda: shop.put(reader, keys), lambda: reader.delete(keys), reader.clear):
        with pytest.raises(ValueError, match="read-only"):
            call()
    assert sorted(tmp_path.rglob("*")) == before


def test_close_gives_up_on_a_call_that_hangs_and_its_end_cleans_up(shop, keys, caplog):
    hang = Hang()
    engine = FaultyEngine(PosixEngine(direct=False, threads=2), hang)
    store = shop.open(engine=engine, io_mode="auto", threads=None)
    caller = threading.Thread(target=shop.put, args=(store, keys[:2]))
    caller.start()
    hang.gate.wait_for()
    store.close(0.2)
    assert "did not return" in caplog.text
    with pytest.raises(ClosedError):
        shop.get(store, keys[:1])
    hang.gate.open()
    caller.join(5)
    assert not caller.is_alive()
    other = shop.open(tenant="other", engine=engine, io_mode="auto", threads=None)
    assert shop.put(other, keys[:40]) == ["stored"] * 40, "it is the caller's, and may serve other stores"
    again = shop.open()  # the lock was given back: the same partition
    assert again.stats()["partition"] == store.stats()["partition"]


class NoAnswer(Fault):
    def strike(self, call, go):
        return None


@pytest.mark.parametrize("fault", [Fail(RuntimeError("boom")), ForgetVerdicts(), NoAnswer()])
def test_an_engine_that_breaks_its_contract_costs_its_pages_only(shop, keys, fault):
    store = shop.open(
        engine=FaultyEngine(PosixEngine(direct=False, threads=2), fault), io_mode="auto", threads=None
    )
    pages = store.stats()["pages"]
    for _ in range(70):  # more than there are slots: none is lost
        reasons = {reason.partition(":")[0] for reason in shop.put(store, keys[:4])}
        assert reasons == {"engine_error"}
    assert store.stats()["pages"] == pages == 0
    assert not store._core.writing
    assert not store._core.writer.pins.any()
    fault.on = False
    assert shop.put(store, keys[:4]) == ["stored"] * 4
    fault.on = True
    assert {reason.partition(":")[0] for reason in shop.get(store, keys[:4])} == {"engine_error"}
    assert not store._core.writer.pins.any()


@pytest.mark.parametrize(("failures", "outcome"), [(2, {"disk_full"}), (1, {"disk_full", "stored"})])
def test_a_page_that_another_call_failed_to_store_is_stored_by_who_waited(shop, keys, failures, outcome):
    hang = Hang()
    fails = Fail("disk_full", lambda call: call.number <= failures)
    engine = FaultyEngine(PosixEngine(direct=False, threads=1), hang, fails)
    store = shop.open(engine=engine, io_mode="auto", threads=None)
    verdicts = {}
    host = ArrayPool(GEOMETRY, "page_first", 2)
    fill_pages(host, [0], keys[:1], PAGE_NBYTES)

    def put(name):
        verdicts[name] = store.put(keys[:1], host, [0])[0]

    first, second = (threading.Thread(target=put, args=(name,)) for name in "ab")
    first.start()
    hang.gate.wait_for()
    second.start()
    time.sleep(0.2)  # until it waits for the first; the outcome is the same where it does not
    hang.gate.open()
    first.join(30)
    second.join(30)
    assert {verdict.reason for verdict in verdicts.values()} == outcome
    assert store.match_prefix(keys[:1]) == ("stored" in outcome)


def test_keys_of_other_types_that_dictionaries_refuse(shop):
    store = shop.open()
    key = bytearray(b"abc")
    assert shop.put(store, [bytes(key)]) == ["stored"]
    assert store.match_prefix([key]) == 1
    assert store.contains([memoryview(key)]) == [True]
    with pytest.raises(ValueError, match="key"):
        store.match_prefix([[1]])
