"""Pages of a device pool whose owner may leave while a call hangs: nothing lands, nothing is committed."""

from __future__ import annotations

import threading

import pytest
import torch

from hicache_tier.layout import Layout
from hicache_tier.testing.array_pool import blank_pages, fill_pages, keys_of, pages_equal
from hicache_tier.testing.device_rig import ALIGNED, GEOMETRIES, BytePool
from hicache_tier_storage import device_payload, open_store, staging
from hicache_tier_storage.leased_device import LeasedDevice
from hicache_tier_storage.posix import PosixEngine

CASES = {
    "staged": (GEOMETRIES["wide_k"], "page_first", "cpu"),
    "fragments": (ALIGNED, "layer_first", "cpu"),
    "from_gpu": (GEOMETRIES["wide_k"], "page_first", "cuda"),
}
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Gated(PosixEngine):
    """An engine that moves bytes only once it is let."""

    def __init__(self):
        super().__init__(direct=False, threads=2)
        self.asked, self.free = threading.Event(), threading.Event()
        self.free.set()

    def read(self, batch):
        return self._do(super().read, batch)

    def write(self, batch):
        return self._do(super().write, batch)

    def _do(self, move, batch):
        self.asked.set()
        assert self.free.wait(20)
        return move(batch)


class Rig:
    def __init__(self, root, geometry, layout, device):
        self.engine = Gated()
        self.store = open_store(
            root, geometry, layout, capacity_bytes="4 MiB", engine=self.engine, deadline_s=None
        )
        self.device = BytePool(geometry, layout, 16, device)
        self.nbytes = geometry.page_nbytes
        self.keys = keys_of("leased", 8)
        fill_pages(self.device, range(8), self.keys, self.nbytes)

    def leave(self, call):
        """Make a call, end its lease while the engine is at it, let the engine go on; return the verdicts."""
        memory, answer = LeasedDevice(self.device), []
        self.engine.asked.clear()
        self.engine.free.clear()
        thread = threading.Thread(target=lambda: answer.extend(call(memory)))
        thread.start()
        assert self.engine.asked.wait(20)
        memory.lease.end()
        self.engine.free.set()
        thread.join(20)
        return [status.reason for status in answer]

    def equal(self, pages):
        return pages_equal(self.device, pages, self.keys, self.nbytes)


@pytest.fixture(params=["staged", "fragments", pytest.param("from_gpu", marks=ON_GPU)])
def rig(request, memory_path, monkeypatch):
    monkeypatch.setattr(device_payload, "FRAGMENT_NBYTES", 4096)
    monkeypatch.setattr(staging, "HALF_NBYTES", 2 * 8192)
    monkeypatch.setattr("hicache_tier_storage.device_moves.LEAST_STEP_NBYTES", 1)
    geometry, layout, device = CASES[request.param]
    made = Rig(memory_path, geometry, layout, device)
    pages = device_payload.DevicePages.of(made.device, Layout.parse(layout))
    assert (pages.fragments is not None) is (request.param == "fragments")
    yield made
    made.store.close()
    made.engine.close()


def test_a_lease_that_lasts_changes_nothing(rig):
    assert all(rig.store.put(rig.keys, LeasedDevice(rig.device), range(8)))
    assert all(rig.store.get(rig.keys, LeasedDevice(rig.device), range(8, 16)))
    assert all(rig.equal(range(8, 16)))


def test_nothing_lands_after_the_lease(rig):
    assert all(rig.store.put(rig.keys, LeasedDevice(rig.device), range(8)))
    blank_pages(rig.device, range(8, 16), rig.nbytes)
    before = [rig.device.read_page(page) for page in range(8, 16)]
    said = rig.leave(lambda memory: rig.store.get(rig.keys, memory, range(8, 16)))
    assert said == ["abandoned"] * 8
    assert [rig.device.read_page(page) for page in range(8, 16)] == before
    assert all(rig.store.get(rig.keys, LeasedDevice(rig.device), range(8, 16)))  # the ring is in order
    assert all(rig.equal(range(8, 16)))


def test_nothing_is_committed_after_the_lease(rig):
    said = rig.leave(lambda memory: rig.store.put(rig.keys, memory, range(8)))
    assert said == ["abandoned"] * 8
    assert not any(rig.store.contains(rig.keys))
    assert all(rig.store.put(rig.keys, LeasedDevice(rig.device), range(8)))
    assert all(rig.store.get(rig.keys, LeasedDevice(rig.device), range(8, 16)))
    assert all(rig.equal(range(8, 16)))


def test_a_lease_that_is_over_moves_nothing(rig):
    memory = LeasedDevice(rig.device)
    memory.lease.end()
    rig.engine.asked.clear()
    assert [one.reason for one in rig.store.put(rig.keys, memory, range(8))] == ["abandoned"] * 8
    assert not rig.engine.asked.is_set()
    assert not any(rig.store.contains(rig.keys))
