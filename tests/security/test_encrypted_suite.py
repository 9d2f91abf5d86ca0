"""What every store promises, an encrypted one keeps; and callers that leave, and pages of device pools."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest

from hicache_tier.geometry import KVGeometry
from hicache_tier.layout import Layout
from hicache_tier.testing.array_pool import (
    ArrayPool,
    blank_pages,
    fill_pages,
    keys_of,
    pages_equal,
    read_page,
)
from hicache_tier.testing.faults import FaultyEngine, Hang
from hicache_tier.testing.store import PageStoreSuite
from hicache_tier.testing.store_rig import GEOMETRY, PAGE_NBYTES
from hicache_tier_storage import EncryptionKey, open_store, sealed_engine
from hicache_tier_storage.lease import Lease
from hicache_tier_storage.posix import PosixEngine

KEY = EncryptionKey(bytes(range(32)))


class Encrypted(PageStoreSuite):
    def open_store(self, root):
        room = 256 * max(8192, self.geometry.page_nbytes)
        options = {"capacity_bytes": room, "io_mode": "buffered", "encryption": KEY}
        return open_store(root, self.geometry, self.layout, **options)


class TestOneRun(Encrypted):
    layout = Layout.PAGE_FIRST


@pytest.mark.usefixtures("short_steps")
class TestPieces(Encrypted):
    layout = Layout.LAYER_FIRST

    @pytest.fixture
    def short_steps(self, monkeypatch):
        """Batches in steps of two pages."""
        monkeypatch.setattr(sealed_engine, "STEP_NBYTES", 2 * 8192)


class View:
    """A pool under a lease."""

    def __init__(self, pool):
        self.pool, self.lease = pool, Lease()
        self.geometry, self.layout = pool.geometry, pool.layout
        self.segment_table, self.in_use = pool.segment_table, pool.in_use


@pytest.mark.parametrize("lands", [False, True])
def test_pages_whose_caller_left_are_not_touched(tmp_path, lands):
    hang = Hang(after=True)
    hang.on = False
    engine = FaultyEngine(PosixEngine(direct=False, threads=2), hang)
    engine.lands = lands
    keys, pool = keys_of("lease", 6), ArrayPool(GEOMETRY, "layer_first", 12)
    fill_pages(pool, range(6), keys, PAGE_NBYTES)
    options = {"capacity_bytes": 2 << 20, "engine": engine, "encryption": KEY}
    with open_store(tmp_path / "root", GEOMETRY, "layer_first", **options) as store:
        view = View(pool)
        assert all(store.put(keys, view, range(6)))
        blank_pages(pool, range(6, 12), PAGE_NBYTES)
        assert all(store.get(keys, view, range(6, 12)))
        assert all(pages_equal(pool, range(6, 12), keys, PAGE_NBYTES))
        blank_pages(pool, range(6, 12), PAGE_NBYTES)
        before = [read_page(pool, page) for page in range(6, 12)]
        view.lease.end()
        assert {status.reason for status in store.get(keys, view, range(6, 12))} == {"abandoned"}
        assert [read_page(pool, page) for page in range(6, 12)] == before
        assert {status.reason for status in store.put(keys_of("late", 3), view, range(3))} == {"abandoned"}
        assert store.match_prefix(keys_of("late", 3)) == 0


def test_pages_of_a_device_pool_are_encrypted_too(tmp_path):
    torch = pytest.importorskip("torch")
    from hicache_tier import DevicePool

    device = DevicePool.empty(GEOMETRY, 8, device="cpu")
    for part in (tensor for pair in device.layers for tensor in pair):
        part.copy_(torch.randint(-100, 100, part.shape).to(part.dtype))
    keys = keys_of("device", 4)
    with open_store(tmp_path, GEOMETRY, "page_first_direct", capacity_bytes=2 << 20, encryption=KEY) as store:
        assert all(store.put(keys, device, range(4)))
        assert all(store.get(keys, device, range(4, 8)))
        for part in (tensor for pair in device.layers for tensor in pair):
            half = part.shape[0] // 2
            assert torch.equal(part[:half], part[half:])
        raw = b"".join(path.read_bytes() for path in tmp_path.glob("*/*/kv/pages/c.*"))
    first = device.layers[0][0]
    assert ctypes.string_at(first.data_ptr(), 64) not in raw


def test_what_lies_between_a_page_and_its_slots_end_is_zero(tmp_path):
    geometry = KVGeometry.mha(num_layers=1, num_kv_heads=1, head_dim=24, dtype="int8", page_tokens=100)
    keys, pool = keys_of("gap", 6), ArrayPool(geometry, "page_first", 6)
    fill_pages(pool, range(6), keys, geometry.page_nbytes)
    with open_store(tmp_path, geometry, "page_first", capacity_bytes=4 << 20, encryption=KEY) as store:
        for _ in range(3):  # in memory that others' pages were in before
            assert all(store.put(keys, pool, range(6)))
            (slab,) = tmp_path.glob("*/*/kv/pages/c.0.0")
            raw = slab.read_bytes()
            assert not any(any(raw[at * 8192 + 4800 : (at + 1) * 8192]) for at in range(6))
            assert any(raw[4700:4800])
            store.delete(keys)


@pytest.mark.parametrize("holds", [True, False])
def test_memory_that_bytes_may_still_arrive_in_is_not_lent_again(tmp_path, monkeypatch, holds):
    held = []

    class Late(PosixEngine):
        holds_batches = holds

        def read(self, batch):
            super().read(batch)
            held.append(weakref.ref(batch.memory_map))
            kept.append(batch)
            return ["timeout: it did not answer"] * len(batch)

    kept = []
    keys, pool = keys_of("late", 4), ArrayPool(GEOMETRY, "page_first", 8)
    fill_pages(pool, range(4), keys, PAGE_NBYTES)
    monkeypatch.setattr(sealed_engine, "_BUFFERS", sealed_engine._Buffers())
    options = {"capacity_bytes": 2 << 20, "engine": Late(direct=False), "encryption": KEY}
    with open_store(tmp_path / "root", GEOMETRY, "page_first", **options) as store:
        assert all(store.put(keys, pool, range(4)))
        assert len(sealed_engine._BUFFERS._idle) == 1
        assert not any(store.get(keys, pool, range(4, 8)))
    assert not sealed_engine._BUFFERS._idle
    gc.collect()
    assert held[0]() is not None, "unmapped while the engine may still write to it"
    kept.clear()
    gc.collect()
    assert (held[0]() is None) is holds, "kept as long as the engine does, for good where that is unknown"
