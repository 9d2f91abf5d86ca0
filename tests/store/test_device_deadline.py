"""Calls on device pools over storage that never answers: they end; nothing lands or is committed after."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from hicache_tier.testing.array_pool import blank_pages, fill_pages, keys_of, pages_equal
from hicache_tier.testing.device_rig import ALIGNED, GEOMETRIES, BytePool
from hicache_tier.testing.faults import FaultyEngine, Hang
from hicache_tier_storage import abandoned, device_payload, open_store, staging
from hicache_tier_storage.device_payload import DevicePayload
from hicache_tier_storage.leased_device import LeasedDevice
from hicache_tier_storage.posix import PosixEngine

DEADLINE_S, PATIENCE_S, SOON_S = 0.3, 60.0, 5.0
KEYS = keys_of("device", 8)
CASES = {
    "staged": (GEOMETRIES["wide_k"], "page_first", "cpu"),
    "fragments": (ALIGNED, "layer_first", "cpu"),
    "on_gpu": (GEOMETRIES["wide_k"], "page_first", "cuda"),
}
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Rig:
    """A store over an engine that can hang, and a device pool whose first eight pages are stored in it."""

    def __init__(self, root, case, *, after):
        geometry, layout, where = CASES[case]
        self.hang = Hang(after=after)
        self.hang.on = False
        self.engine = FaultyEngine(PosixEngine(direct=False, threads=2), self.hang)
        options = {"capacity_bytes": "4 MiB", "engine": self.engine, "deadline_s": PATIENCE_S}
        self.store = open_store(root, geometry, layout, **options)
        self.device, self.nbytes = BytePool(geometry, layout, 16, where), geometry.page_nbytes
        fill_pages(self.device, range(8), KEYS, self.nbytes)
        assert all(self.store.put(KEYS, self.device, range(8)))

    def hung(self, call):
        """Return the verdicts on a call while the engine hangs."""
        self.hang.on, self.store.deadline_s = True, DEADLINE_S
        started = time.monotonic()
        status = call()
        assert time.monotonic() - started < DEADLINE_S + SOON_S
        self.hang.on, self.store.deadline_s = False, PATIENCE_S
        return {verdict.kind for verdict in status}

    def answer(self):
        """Have what hung return."""
        self.hang.gate.open()
        end = time.monotonic() + 60
        while self.store.stats()["calls_in_flight"]:
            assert time.monotonic() < end
            time.sleep(0.01)

    def contents(self, pages):
        return [self.device.read_page(page) for page in pages]

    def equal(self, pages, keys=KEYS):
        return all(pages_equal(self.device, pages, keys, self.nbytes))


@pytest.fixture(params=["staged", "fragments", pytest.param("on_gpu", marks=ON_GPU)])
def case(request, monkeypatch):
    monkeypatch.setattr(device_payload, "FRAGMENT_NBYTES", 4096)
    monkeypatch.setattr(staging, "HALF_NBYTES", 2 * 8192)
    monkeypatch.setattr("hicache_tier_storage.device_moves.LEAST_STEP_NBYTES", 1)
    monkeypatch.setattr(staging, "_RINGS_OF_PROCESS", staging._Rings())
    return request.param


@pytest.fixture(params=[False, True], ids=["before", "after"])
def rig(request, case, memory_path):
    made = Rig(memory_path, case, after=request.param)
    yield made
    made.hang.gate.open()
    made.store.close()
    made.engine.close()


def test_a_get_that_hangs_is_a_miss_and_writes_nothing_to_the_pool_any_more(rig):
    blank_pages(rig.device, range(8, 16), rig.nbytes)
    before = rig.contents(range(8, 16))
    assert rig.hung(lambda: rig.store.get(KEYS, rig.device, range(8, 16))) == {"timeout"}
    assert rig.contents(range(8, 16)) == before
    rig.answer()
    assert rig.contents(range(8, 16)) == before
    assert all(rig.store.get(KEYS, rig.device, range(8, 16)))
    assert rig.equal(range(8, 16))


def test_a_put_that_hangs_commits_nothing(rig):
    keys = keys_of("late", 8)
    fill_pages(rig.device, range(8, 16), keys, rig.nbytes)
    assert rig.hung(lambda: rig.store.put(keys, rig.device, range(8, 16))) == {"timeout"}
    blank_pages(rig.device, range(8, 16), rig.nbytes)  # what is done with the pages next
    rig.answer()
    assert not any(rig.store.contains(keys))
    fill_pages(rig.device, range(8, 16), keys, rig.nbytes)
    assert all(rig.store.put(keys, rig.device, range(8, 16)))
    assert all(rig.store.get(keys, rig.device, range(8)))
    assert rig.equal(range(8), keys)


def test_a_lease_of_the_callers_own_is_the_callers_to_end(rig):
    memory = LeasedDevice(rig.device)
    blank_pages(rig.device, range(8, 16), rig.nbytes)
    assert rig.hung(lambda: rig.store.get(KEYS, memory, range(8, 16))) == {"timeout"}
    assert not memory.lease.ended
    rig.answer()
    assert rig.equal(range(8, 16))


@pytest.mark.parametrize("verb", ["put", "get"])
def test_a_call_follows_the_stream_of_the_thread_that_made_it(memory_path, monkeypatch, verb):
    """What a device was given is marked by the caller's thread, and the move on the other waits for it."""
    device, seen = BytePool(ALIGNED, "page_first", 8), SimpleNamespace(marks={}, begins=[])

    def given_so_far(where):
        assert where == device.device
        mark = object()
        seen.marks[mark] = threading.current_thread()
        return mark

    def move(payload, *arguments, **options):
        seen.begins.append((payload.begin, threading.current_thread()))
        return real(payload, *arguments, **options)

    real = DevicePayload.move
    with open_store(memory_path, ALIGNED, "page_first", capacity_bytes="4 MiB") as store:
        assert all(store.put(KEYS[:4], device, range(4)))
        monkeypatch.setattr(staging, "given_so_far", given_so_far)
        monkeypatch.setattr(DevicePayload, "move", move)
        keys = KEYS[:4] if verb == "get" else KEYS[4:]
        assert all(getattr(store, verb)(keys, device, torch.arange(4, 8)))
    ((begin, mover),) = seen.begins
    assert seen.marks[begin] is threading.current_thread()
    assert mover is not threading.current_thread()


def test_page_numbers_are_the_calls_own(memory_path):
    """A call that begins late, in a process that was stopped say, goes by the numbers that it was given."""
    numbers = torch.arange(4)
    memory = abandoned.abandonable(BytePool(ALIGNED, "page_first", 8), numbers, write=False)
    numbers += 4
    assert memory.pages.tolist() == [0, 1, 2, 3]
