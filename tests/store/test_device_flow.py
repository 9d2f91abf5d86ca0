"""How pages of a device flow through engines that have many batches under way.

Host memory stands for the device's: the ring says that it is on one, kvikio is a stand-in, and NIXL is real
with its POSIX plug-in in place of GDS_MT. `test_device_route_gpu.py` has the real thing.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

from hicache_tier.layout import Layout
from hicache_tier.testing.array_pool import blank_pages, fill_pages, keys_of, pages_equal
from hicache_tier.testing.device_engines import Patient, device_engine, pretend_device, short_steps
from hicache_tier.testing.device_rig import ALIGNED, GEOMETRIES, BytePool
from hicache_tier.testing.kvikio_stand_in import CuFile
from hicache_tier.testing.store import PageStoreSuite
from hicache_tier_storage import getter, kvikio_engine, nixl_device, open_store, putter, staging
from hicache_tier_storage.device_moves import RingMove
from hicache_tier_storage.engine import StartingEngine
from hicache_tier_storage.leased_device import LeasedDevice
from hicache_tier_storage.nixl_lane import NixlLane
from hicache_tier_storage.nixl_package import why_no_nixl
from hicache_tier_storage.putter import Putter
from hicache_tier_storage.slab import StoreFile

needs_nixl = [pytest.mark.nixl, pytest.mark.skipif(bool(why_no_nixl()), reason=why_no_nixl())]
ENGINES = ["kvikio", pytest.param("nixl", marks=needs_nixl)]
NBYTES = ALIGNED.page_nbytes  # a multiple of 4096: slots have no gaps


@pytest.fixture(autouse=True)
def pretended(monkeypatch):
    pretend_device(monkeypatch)


class Flowing(PageStoreSuite):
    kind = "kvikio"

    @pytest.fixture(autouse=True)
    def engine(self, pretended, monkeypatch):
        short_steps(monkeypatch, 4, 8192)
        self._engine = device_engine(self.kind)
        yield
        self._engine.close()

    def open_store(self, root):
        room = 256 * max(8192, self.geometry.page_nbytes)
        return open_store(root, self.geometry, self.layout, capacity_bytes=room, engine=self._engine)

    def pool(self):
        return BytePool(self.geometry, self.layout, 48)


class TestKvikio(Flowing):
    layout = Layout.PAGE_FIRST_DIRECT


class TestNixl(Flowing):
    pytestmark = needs_nixl
    kind = "nixl"


@pytest.fixture(params=ENGINES)
def rig(request, memory_path):
    """A store, a pool of 128 pages, the first 64 filled, their keys, and lengths of the engine's calls."""
    engine, device, keys = (
        device_engine(request.param),
        BytePool(ALIGNED, "page_first", 128),
        keys_of("flow", 64),
    )
    fill_pages(device, range(64), keys, NBYTES)
    options = {"capacity_bytes": "64 MiB", "engine": engine, "verify": "always"}
    with (
        open_store(memory_path, ALIGNED, "page_first", **options) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        module, name = (kvikio_engine, "_DEVICE_TASK_NBYTES"), (nixl_device, "_TASK_NBYTES")
        module, name = module if request.param == "kvikio" else name
        patch.setattr(module, name, 4 * NBYTES + 100)
        calls, real = [], module.describe

        def describe(*arguments):
            found = real(*arguments)
            calls.extend(found.files[:, 1].tolist())
            return found

        patch.setattr(module, "describe", describe)
        yield SimpleNamespace(store=store, engine=engine, device=device, keys=keys, calls=calls)
    engine.close()


def kinds(status):
    return [verdict.kind for verdict in status]


def test_neighbouring_slots_move_in_one_call(rig):
    assert all(rig.store.put(rig.keys, rig.device, range(64)))
    assert rig.calls == [4 * NBYTES] * 16
    rig.calls.clear()
    assert all(rig.store.get(rig.keys, rig.device, range(64, 128)))
    assert rig.calls == [4 * NBYTES] * 16
    assert all(pages_equal(rig.device, range(64, 128), rig.keys, NBYTES))
    assert rig.engine.retried_pages == 0


def test_slots_apart_move_in_calls_of_their_own(rig):
    assert all(rig.store.put(rig.keys, rig.device, range(64)))
    wanted = [key for number, key in enumerate(rig.keys) if number % 4 != 3]
    rig.calls.clear()
    assert all(rig.store.get(wanted, rig.device, range(64, 112)))
    assert sum(rig.calls) == 48 * NBYTES
    assert set(rig.calls) <= {NBYTES, 2 * NBYTES, 3 * NBYTES}  # a call ends after each fourth page too
    assert all(pages_equal(rig.device, range(64, 112), wanted, NBYTES))


def test_a_run_that_was_short_fails_the_pages_that_are_not_there(rig, monkeypatch):
    """Cut after it was opened and checked, so that only the transfer can see it, amid a run of four."""
    assert all(rig.store.put(rig.keys, rig.device, range(64)))
    slots = [rig.store._core.index[key] for key in rig.keys]
    (slab,) = {id(slab): slab for slab in rig.store._core.writer.slabs.values()}.values()
    os.truncate(slab.path, 37 * NBYTES + 100)
    monkeypatch.setattr(StoreFile, "check", lambda *_: None)
    blank_pages(rig.device, range(64, 128), NBYTES)
    status = rig.store.get(rig.keys, rig.device, range(64, 128))
    assert kinds(status) == ["loaded" if slot < 37 else "io_error" for slot in slots]
    equal = pages_equal(rig.device, range(64, 128), rig.keys, NBYTES)
    assert equal == [slot < 37 for slot in slots]
    assert NBYTES in rig.calls  # one by one
    assert rig.engine.retried_pages >= 27


def test_a_damaged_page_of_a_run_is_not_loaded(rig):
    assert all(rig.store.put(rig.keys, rig.device, range(64)))
    slab = rig.store._core.writer.slabs[0].path
    with slab.open("r+b") as file:
        file.seek(rig.store._core.index[rig.keys[5]] * NBYTES + 99)
        file.write(b"\0\1\2\3")
    status = rig.store.get(rig.keys, rig.device, range(64, 128))
    assert kinds(status) == ["checksum" if number == 5 else "loaded" for number in range(64)]


def test_a_damaged_record_costs_its_page_alone(rig):
    """It is told while pages are under way."""
    assert all(rig.store.put(rig.keys, rig.device, range(64)))
    slot = rig.store._core.index[rig.keys[5]]
    rig.store._core.writer.tables.tables[0].words[slot, 7] ^= np.uint64(1)
    status = rig.store.get(rig.keys, rig.device, range(64, 128))
    assert kinds(status) == ["changed" if number == 5 else "loaded" for number in range(64)]
    assert rig.store.get(rig.keys[5:6], rig.device, [69])[0].reason == "absent"


def test_nothing_lands_after_the_lease(rig, monkeypatch):
    assert all(rig.store.put(rig.keys, rig.device, range(64)))
    short_steps(monkeypatch, 8, NBYTES)
    blank_pages(rig.device, range(64, 128), NBYTES)
    before = [rig.device.read_page(page) for page in range(64, 128)]
    memory, real = LeasedDevice(rig.device), RingMove.batch

    def last(move, start, stop):
        if start == 4:
            memory.lease.end()
        return real(move, start, stop)

    monkeypatch.setattr(RingMove, "batch", last)
    with open_store(rig.store.root, ALIGNED, "page_first", engine=rig.engine, deadline_s=None) as other:
        assert kinds(other.get(rig.keys, memory, range(64, 128))) == ["abandoned"] * 64
    assert [rig.device.read_page(page) for page in range(64, 128)] == before


def test_a_call_that_never_ends(memory_path, monkeypatch):
    """What else was under way counts; what was not begun is not tried; the ring is not lent again."""
    short_steps(monkeypatch, 4, NBYTES)
    engine, device, keys = (
        device_engine("kvikio", deadline_s=0.3),
        BytePool(ALIGNED, "page_first", 16),
        keys_of("x", 8),
    )
    fill_pages(device, range(8), keys, NBYTES)
    real = CuFile.pwrite

    def pwrite(file, memory, file_offset):
        if file_offset == NBYTES:
            return SimpleNamespace(done=lambda: False)
        return real(file, memory, file_offset)

    with open_store(memory_path, ALIGNED, "page_first", capacity_bytes="16 MiB", engine=engine) as store:
        with monkeypatch.context() as patch:
            patch.setattr(CuFile, "pwrite", pwrite)
            found = kinds(store.put(keys, device, range(8)))
        assert found[:2] == ["stored", "timeout"]
        assert set(found[2:]) == {"stored", "not_tried"}
        assert len(staging._RINGS_OF_PROCESS.given_up) == 1
        assert all(store.put(keys, device, range(8)))
        assert all(store.get(keys, device, range(8, 16)))
    assert all(pages_equal(device, range(8, 16), keys, NBYTES))
    engine.close()


@pytest.mark.parametrize("a_step", [1, 2])
def test_as_much_is_under_way_as_the_ring_has_room_for(memory_path, monkeypatch, a_step):
    """One step ends and another begins: nobody waits for the slowest of several."""
    short_steps(monkeypatch, 8, NBYTES, a_step)
    engine, device, keys = Patient(), BytePool(ALIGNED, "page_first", 64), keys_of("full", 31)
    assert isinstance(engine, StartingEngine)
    fill_pages(device, range(31), keys, NBYTES)
    most, steps = 8 // a_step, -(-31 // a_step)
    expected = [min(most, steps - number) for number in range(steps)]
    with open_store(memory_path, ALIGNED, "page_first", capacity_bytes="16 MiB", engine=engine) as store:
        assert all(store.put(keys, device, range(31)))
        assert engine.seen == expected
        engine.seen.clear()
        assert all(store.get(keys, device, range(32, 63)))
        assert engine.seen == expected
    assert all(pages_equal(device, range(32, 63), keys, NBYTES))
    engine.close()


@pytest.mark.parametrize("checksums", [True, False])
def test_records_are_seen_to_while_pages_are_under_way(memory_path, monkeypatch, checksums):
    short_steps(monkeypatch, 8, NBYTES)
    engine, device, keys, seen = Patient(), BytePool(ALIGNED, "page_first", 32), keys_of("records", 16), []

    def noting(real):
        def noted(*arguments, **options):
            seen.append(len(engine.under_way))
            return real(*arguments, **options)

        return noted

    monkeypatch.setattr(Putter, "_describe", noting(Putter._describe))
    monkeypatch.setattr(putter, "complete", noting(putter.complete))
    monkeypatch.setattr(getter, "_check_records", noting(getter._check_records))
    fill_pages(device, range(16), keys, NBYTES)
    options = {"capacity_bytes": "16 MiB", "engine": engine, "checksums": checksums}
    with open_store(memory_path, ALIGNED, "page_first", **options) as store:
        assert all(store.put(keys, device, range(16)))
        assert all(store.get(keys, device, range(16, 32)))
    assert seen == [8, 8, 8]
    assert all(pages_equal(device, range(16, 32), keys, NBYTES))
    engine.close()


@pytest.mark.parametrize("verb", ["put", "get"])
def test_waits_for_the_device_beside_io_are_no_cost_of_staging(memory_path, monkeypatch, verb):
    """Those before the first step and after the last are, and the one at the end of the call."""
    short_steps(monkeypatch, 4, NBYTES)
    engine, device, keys = Patient(), BytePool(ALIGNED, "page_first", 16), keys_of("waits", 16)
    with open_store(memory_path, ALIGNED, "page_first", capacity_bytes="16 MiB", engine=engine) as store:
        if verb == "get":
            assert all(store.put(keys, device, range(16)))
        before = staging.waited_s()
        monkeypatch.setattr(staging.Ring, "wait", lambda ring, mark: 1.0)
        assert all(getattr(store, verb)(keys, device, range(16)))
        assert staging.waited_s() - before == 2
    engine.close()


@pytest.mark.parametrize("kind", [pytest.param("nixl", marks=needs_nixl)])
def test_an_agent_that_refused_a_transfer_is_made_anew(memory_path, monkeypatch, kind):
    """Once what it has under way has ended: the memory must not be known to two agents."""
    short_steps(monkeypatch, 4, NBYTES)
    engine, device, keys = device_engine(kind), BytePool(ALIGNED, "page_first", 16), keys_of("anew", 8)
    fill_pages(device, range(8), keys, NBYTES)
    made, real = [], NixlLane.post

    def post(lane, *arguments, **options):
        made.append(lane)
        if len(made) == 3:
            lane._agent.transfer = lambda _: 1 / 0
        return real(lane, *arguments, **options)

    with open_store(memory_path, ALIGNED, "page_first", capacity_bytes="16 MiB", engine=engine) as store:
        with monkeypatch.context() as patch:
            patch.setattr(NixlLane, "post", post)
            found = kinds(store.put(keys, device, range(8)))
        assert found[:2] == ["stored"] * 2
        assert found[2] == "io_error"
        assert not staging._RINGS_OF_PROCESS.given_up
        assert all(store.put(keys, device, range(8)))
        assert made[2]._agent is None
        assert all(store.get(keys, device, range(8, 16)))
    assert all(pages_equal(device, range(8, 16), keys, NBYTES))
    engine.close()


def test_pages_with_gaps_and_scattered_ones(memory_path, monkeypatch):
    """What lies between page and slot is written as zeros also where the ring comes round."""
    geometry = GEOMETRIES["wide_k"]
    nbytes, stride = geometry.page_nbytes, 8192
    assert nbytes < stride
    short_steps(monkeypatch, 4, stride)
    engine, device, keys = device_engine("kvikio"), BytePool(geometry, "page_first", 32), keys_of("gaps", 14)
    fill_pages(device, range(14), keys, nbytes)
    with open_store(memory_path, geometry, "page_first", capacity_bytes="4 MiB", engine=engine) as store:
        assert all(store.put(keys, device, range(14)))
        back = list(range(31, 17, -1))
        assert all(store.get(keys, device, back))
        assert all(pages_equal(device, back, keys, nbytes))
        slab = store._core.writer.slabs[0].path.read_bytes()
    assert all(not any(slab[slot * stride + nbytes : (slot + 1) * stride]) for slot in range(14))
    engine.close()
