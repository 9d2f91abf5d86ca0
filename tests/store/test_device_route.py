"""The device route: pages of a device pool to slots and back, without a host pool.

Everything but the kernels runs here on pools in the CPU's memory; `test_device_route_gpu.py` has the rest.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from hicache_tier import DevicePool, UnsupportedTransferError
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.layout import Layout
from hicache_tier.testing.array_pool import (
    ArrayPool,
    blank_pages,
    fill_pages,
    keys_of,
    page_bytes,
    pages_equal,
    read_page,
)
from hicache_tier.testing.device_rig import ALIGNED, GEOMETRIES, BytePool
from hicache_tier.testing.store import PageStoreSuite
from hicache_tier_storage import device_payload, open_store, staging
from hicache_tier_storage.device_moves import RingMove
from hicache_tier_storage.encryption import EncryptionKey
from hicache_tier_storage.posix import PosixEngine
from hicache_tier_storage.record import FLAG_FROM_GPU

PAGES = 48


class OnCpu(PageStoreSuite):
    gap = 0

    @pytest.fixture
    def tmp_path(self, memory_path):
        return memory_path

    def open_store(self, root):
        room = 256 * max(8192, self.geometry.page_nbytes)
        return open_store(root, self.geometry, self.layout, capacity_bytes=room, io_mode="buffered")

    def pool(self):
        return BytePool(self.geometry, self.layout, PAGES, gap=self.gap)


@pytest.fixture
def short_steps(monkeypatch):
    """Halves of two slots, so that every batch takes many turns."""
    monkeypatch.setattr(staging, "HALF_NBYTES", 2 * 8192)
    monkeypatch.setattr("hicache_tier_storage.device_moves.LEAST_STEP_NBYTES", 1)


class TestStaged(OnCpu):
    layout = Layout.PAGE_FIRST_DIRECT


@pytest.mark.usefixtures("short_steps")
class TestStagedInManySteps(OnCpu):
    gap = 32


class TestFragments(OnCpu):
    """Every page's fragments move by themselves, straight from the pool."""

    geometry = ALIGNED
    layout = Layout.LAYER_FIRST

    @pytest.fixture(autouse=True)
    def small_fragments(self, monkeypatch):
        monkeypatch.setattr(device_payload, "FRAGMENT_NBYTES", 4096)
        monkeypatch.setattr("hicache_tier_storage.device_moves.STEP_NBYTES", 3 * ALIGNED.page_nbytes)
        pool = self.pool()
        assert device_payload.DevicePages.of(pool, self.layout).fragments is not None


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("kind", GEOMETRIES)
def test_both_routes_read_and_write_the_same_slots(memory_path, kind, layout, short_steps):
    geometry, keys = GEOMETRIES[kind], keys_of("same", 8)
    nbytes = geometry.page_nbytes
    host, device = ArrayPool(geometry, layout, 16), BytePool(geometry, layout, 16)
    with open_store(memory_path, geometry, layout, capacity_bytes="4 MiB", verify="always") as store:
        for there, back, part in ((device, host, keys[:4]), (host, device, keys[4:])):
            fill_pages(there, range(3, 7), part, nbytes)
            assert all(store.put(part, there, range(3, 7)))
            assert all(store.get(part, back, [9, 0, 15, 2]))
            assert all(pages_equal(back, [9, 0, 15, 2], part, nbytes))


def test_a_sharded_pool(memory_path):
    """The store holds the pages of the layers that this rank owns."""
    whole = GEOMETRIES["mha"]
    device = BytePool(whole, "layer_first", 8, owned_layers=[0, 2])
    keys, nbytes = keys_of("shard", 4), device.local_geometry.page_nbytes
    fill_pages(device, range(4), keys, nbytes)
    options = {"capacity_bytes": "4 MiB", "cp": (0, 2)}
    with open_store(memory_path, whole.with_layers(2), "layer_first", **options) as store:
        assert all(store.put(keys, device, range(4)))
        assert all(store.get(keys, device, range(4, 8)))
    assert all(pages_equal(device, range(4, 8), keys, nbytes))


@pytest.mark.parametrize(
    ("layout", "owned", "why"),
    [
        ("page_head", None, "rows are split by head"),
        ("page_first", [0, 2], "spread over"),
        ("page_first_direct", [0, 2], "spread over"),
    ],
)
def test_what_the_path_table_refuses(memory_path, layout, owned, why):
    device = BytePool(ALIGNED, layout, 4, owned_layers=owned)
    keys = keys_of("no", 1)
    with open_store(memory_path, device.local_geometry, layout, capacity_bytes="4 MiB") as store:
        for verb in (store.put, store.get):
            with pytest.raises(UnsupportedTransferError, match=why) as caught:
                verb(keys, device, [0])
            assert caught.value.io_backend == "device"
            assert caught.value.sharded is bool(owned)
            assert "layout='layer_first'" in caught.value.alternatives
        assert store.stats()["put"] == {}


def test_wrong_pools_and_pages(memory_path):
    keys = keys_of("wrong", 2)
    with open_store(memory_path, ALIGNED, "page_first", capacity_bytes="4 MiB") as store:
        for pool in (DevicePool.empty(ALIGNED.with_layers(4), 4), object()):
            with pytest.raises(InvalidArgumentError, match="pool"):
                store.put(keys, pool, [0, 1])
        device = DevicePool.empty(ALIGNED, 4)
        for pages in ([0], [0, 4], [-1, 0], [0.0, 1.0]):
            with pytest.raises(InvalidArgumentError):
                store.put(keys, device, pages)
        with pytest.raises(InvalidArgumentError, match="twice"):
            store.get(keys, device, [1, 1])


def test_several_roots(memory_path):
    keys, device = keys_of("roots", 24), BytePool(ALIGNED, "page_first", 48)
    nbytes = ALIGNED.page_nbytes
    fill_pages(device, range(24), keys, nbytes)
    roots = [memory_path / "a", memory_path / "b"]
    with open_store(roots, ALIGNED, "page_first", capacity_bytes="64 MiB") as store:
        assert all(store.put(keys, device, range(24)))
        assert all(root["pages"] for root in store.stats()["roots"])
        assert all(store.get(keys, device, range(24, 48)))
    assert all(pages_equal(device, range(24, 48), keys, nbytes))


class Wrapped:
    """An engine around another, for faults."""

    name, mode = "wrapped", "wrapped"

    def __init__(self, inner):
        self.inner = inner
        self.batches = []

    def write(self, batch):
        self.batches.append(batch)
        return self.inner.write(batch)

    def read(self, batch):
        self.batches.append(batch)
        return self.inner.read(batch)

    def close(self):
        self.inner.close()


@pytest.fixture
def rig(memory_path, short_steps):
    """A store that stages two pages at a time, a pool of 16 pages with 8 filled, and their keys."""
    engine = Wrapped(PosixEngine(direct=False, threads=2))
    device, keys = BytePool(GEOMETRIES["wide_k"], "page_first", 16), keys_of("rig", 8)
    fill_pages(device, range(8), keys, device.geometry.page_nbytes)
    options = {"capacity_bytes": "4 MiB", "engine": engine, "verify": "always"}
    with open_store(memory_path, device.geometry, "page_first", **options) as store:
        yield SimpleNamespace(store=store, engine=engine, device=device, keys=keys)
    engine.close()


def reasons(status):
    return [verdict.kind for verdict in status]


def test_whole_slots_leave_the_ring_and_gaps_hold_nothing_of_other_pages(rig):
    nbytes, stride = rig.device.geometry.page_nbytes, 8192
    assert nbytes < stride
    with open_store(rig.store.root / ".." / "other", ALIGNED, "page_first", capacity_bytes="4 MiB") as other:
        full = BytePool(ALIGNED, "page_first", 8)
        fill_pages(full, range(8), rig.keys, ALIGNED.page_nbytes)
        assert all(other.put(rig.keys, full, range(8)))  # its bytes are left in the ring
    assert all(rig.store.put(rig.keys, rig.device, range(8)))
    for batch in rig.engine.batches:
        assert batch.nbytes.tolist() == [stride]
        assert len(batch) <= 2
        assert not (batch.addresses % 4096).any()
    slab = rig.store._core.writer.slabs[0].path.read_bytes()
    for slot in range(8):
        assert not any(slab[slot * stride + nbytes : (slot + 1) * stride])


def test_an_engine_that_raises_or_refuses_costs_its_pages_only(rig, monkeypatch):
    def write(batch):
        turn = int(batch.offsets[0]) // (2 * 8192)
        if turn == 1:
            raise RuntimeError("boom")
        return ["disk_full"] * len(batch) if turn == 2 else rig.engine.inner.write(batch)

    monkeypatch.setattr(rig.engine, "write", write)
    status = rig.store.put(rig.keys, rig.device, range(8))
    expected = ["stored"] * 2 + ["engine_error"] * 2 + ["disk_full"] * 2 + ["stored"] * 2
    assert reasons(status) == expected
    monkeypatch.undo()
    assert all(rig.store.put(rig.keys, rig.device, range(8)))
    assert all(rig.store.get(rig.keys, rig.device, range(8, 16)))
    assert all(pages_equal(rig.device, range(8, 16), rig.keys, rig.device.geometry.page_nbytes))


def test_a_page_that_was_not_read_is_not_scattered(rig, monkeypatch):
    assert all(rig.store.put(rig.keys, rig.device, range(8)))
    nbytes = rig.device.geometry.page_nbytes
    blank_pages(rig.device, range(8, 16), nbytes)

    def read(batch):
        found = rig.engine.inner.read(batch)
        return [found[0], "io_error: no"]

    monkeypatch.setattr(rig.engine, "read", read)
    status = rig.store.get(rig.keys, rig.device, range(8, 16))
    assert reasons(status) == ["loaded", "io_error"] * 4
    assert pages_equal(rig.device, range(8, 16), rig.keys, nbytes) == [True, False] * 4
    assert all(read_page(rig.device, page) == b"\xa5" * nbytes for page in range(9, 16, 2))


def test_a_damaged_page(rig):
    assert all(rig.store.put(rig.keys, rig.device, range(8)))
    path = rig.store._core.writer.slabs[0].path
    slot = rig.store._core.index[rig.keys[3]]
    with path.open("r+b") as file:
        file.seek(slot * 8192 + 99)
        file.write(b"\0\1\2\3")
    status = rig.store.get(rig.keys, rig.device, range(8, 16))
    assert reasons(status) == ["loaded"] * 3 + ["checksum"] + ["loaded"] * 4


@pytest.mark.parametrize("verb", ["put", "get"])
def test_a_ring_with_bytes_under_way_is_never_lent_again(rig, monkeypatch, verb):
    assert all(rig.store.put(rig.keys, rig.device, range(8)))
    if verb == "put":
        rig.store.clear()
    hung = []

    def late(batch):
        if not hung:
            hung.append(batch.addresses)
            return ["timeout: no end after 60 s"] * len(batch)
        time.sleep(0.05)
        return rig.engine.inner.write(batch) if verb == "put" else rig.engine.inner.read(batch)

    monkeypatch.setattr(rig.engine, "write" if verb == "put" else "read", late)
    call = getattr(rig.store, verb)
    found = reasons(call(rig.keys, rig.device, range(8)))
    assert sorted(found)[-2:] == ["timeout"] * 2
    assert "not_tried" in found
    assert set(found) <= {"timeout", "not_tried", "stored", "loaded"}  # what was under way beside it
    before = len(rig.engine.batches)
    monkeypatch.undo()
    assert all(call(rig.keys, rig.device, range(8)))
    low, high = int(hung[0].min()), int(hung[0].max()) + 8192
    for batch in rig.engine.batches[before:]:
        assert not ((batch.addresses >= low) & (batch.addresses < high)).any()


def test_a_ring_that_cannot_be_had_is_a_reason(rig, monkeypatch):
    def no_memory(*_):
        raise MemoryError("out of memory")

    monkeypatch.setattr(staging, "_RINGS_OF_PROCESS", staging._Rings())
    monkeypatch.setattr(staging, "slot_map", no_memory)
    assert reasons(rig.store.put(rig.keys, rig.device, range(8))) == ["device_error"] * 8
    monkeypatch.undo()
    assert all(rig.store.put(rig.keys, rig.device, range(8)))


def test_rings_are_bounded_and_waited_for(rig, monkeypatch):
    rings = staging._Rings()
    monkeypatch.setattr(staging, "_RINGS_OF_PROCESS", rings)
    monkeypatch.setattr(staging, "_DEADLINE_S", 0.2)
    go, inside = threading.Event(), threading.Semaphore(0)

    def slow(batch):
        inside.release()
        go.wait(20)
        return rig.engine.inner.write(batch)

    monkeypatch.setattr(rig.engine, "write", slow)
    with ThreadPoolExecutor(5) as pool:
        held = [
            pool.submit(rig.store.put, rig.keys[number : number + 1], rig.device, [number])
            for number in range(staging._RINGS)
        ]
        for _ in held:
            assert inside.acquire(timeout=10)
        assert reasons(rig.store.put(rig.keys[6:7], rig.device, [6])) == ["device_busy"]
        go.set()
        assert all(future.result(10)[0] for future in held)
    assert all(rig.store.put(rig.keys, rig.device, range(8)))
    assert sum(map(len, rings.idle.values())) <= staging._RINGS
    assert not any(rings.lent.values())


def test_flags_and_checksums_of_a_pool_in_host_memory(rig):
    """Nothing of it was on a device, so nothing says so."""
    assert all(rig.store.put(rig.keys, rig.device, range(8)))
    writer = rig.store._core.writer
    records = writer.pages_of(0).records
    assert not (records["flags"] & FLAG_FROM_GPU).any()
    assert (records["algorithm"] == 2).all()
    assert rig.store.stats()["device_mode"] is None


@pytest.mark.parametrize("verb", ["put", "get"])
def test_two_steps_are_under_way_at_once(rig, monkeypatch, verb):
    assert all(rig.store.put(rig.keys, rig.device, range(8)))
    if verb == "put":
        rig.store.clear()
    together = threading.Barrier(2, timeout=10)
    name = "write" if verb == "put" else "read"
    real = getattr(rig.engine.inner, name)

    def move(batch):
        together.wait()  # broken where nobody comes
        return real(batch)

    monkeypatch.setattr(rig.engine, name, move)
    assert all(getattr(rig.store, verb)(rig.keys, rig.device, range(8)))


def test_an_interrupted_call_leaves_nobody_in_the_ring(rig, monkeypatch):
    """The threads of the ring are waited for, whatever the caller's own thread runs into."""
    inside = []

    def slow(batch):
        inside.append(1)
        time.sleep(0.1)
        inside.pop()
        return rig.engine.inner.write(batch)

    def interrupted(self, start, stop):
        if start >= 4:
            raise KeyboardInterrupt
        return real(self, start, stop)

    real = RingMove.fill
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "write", slow)
        patch.setattr(RingMove, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig.store.put(rig.keys, rig.device, range(8))
        assert not inside
    assert rig.store.stats()["pages"] == 0
    assert all(rig.store.put(rig.keys, rig.device, range(8)))
    assert all(rig.store.get(rig.keys, rig.device, range(8, 16)))
    assert all(pages_equal(rig.device, range(8, 16), rig.keys, rig.device.geometry.page_nbytes))


def test_encrypted_pages_are_staged_in_host_memory(memory_path, short_steps):
    pytest.importorskip("cryptography")
    keys, geometry = keys_of("sealed", 8), GEOMETRIES["wide_k"]
    nbytes = geometry.page_nbytes
    host, device = ArrayPool(geometry, "page_first", 16), BytePool(geometry, "page_first", 16)
    options = {"capacity_bytes": "4 MiB", "encryption": EncryptionKey(bytes(range(32)))}
    with open_store(memory_path, geometry, "page_first", **options) as store:
        for there, back, part in ((device, host, keys[:4]), (host, device, keys[4:])):
            fill_pages(there, range(4), part, nbytes)
            assert all(store.put(part, there, range(4)))
            assert all(store.get(part, back, range(8, 12)))
            assert all(pages_equal(back, range(8, 12), part, nbytes))
        slab = store._core.writer.slabs[0].path
        assert not any(page_bytes(key, nbytes)[:64] in slab.read_bytes() for key in keys)
        slot = store._core.index[keys[1]]
        with slab.open("r+b") as file:
            file.seek(slot * 8192 + 10)
            file.write(b"other")
        blank_pages(device, range(8, 12), nbytes)
        assert reasons(store.get(keys[:4], device, range(8, 12))).count("loaded") == 3
