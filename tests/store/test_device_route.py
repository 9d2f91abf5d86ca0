"""The device route: pages of a device pool to slots and back, without a host pool.

Everything but the kernels runs here on pools in the CPU's memory; `test_device_route_gpu.py` has the rest.
"""

from __future__ import annotations

import pytest

from hicache_tier import DevicePool, UnsupportedTransferError
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.layout import Layout
from hicache_tier.testing.array_pool import ArrayPool, fill_pages, keys_of, pages_equal
from hicache_tier.testing.device_rig import ALIGNED, GEOMETRIES, BytePool
from hicache_tier.testing.store import PageStoreSuite
from hicache_tier_storage import device_payload, open_store, staging

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
