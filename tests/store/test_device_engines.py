"""Engines given memory of a device, where host memory stands for the device's.

kvikio is a stand-in that takes what has an address; NIXL is real, with its POSIX plug-in in place of GDS_MT.
So the suite, retries, deadlines and registrations are seen without a GPU; `test_device_route_gpu.py` has the
real thing.
"""

from __future__ import annotations

import gc
import os
import time
from types import SimpleNamespace

import pytest

from hicache_tier.testing import device_engines
from hicache_tier.testing.device_engines import device_engine, stand_in_for_kvikio
from hicache_tier.testing.engine import Bench, ByteEngineSuite, Memory
from hicache_tier.testing.kvikio_stand_in import CuFile
from hicache_tier_storage.engine import DeviceEngine, DeviceMemory
from hicache_tier_storage.nixl_engine import NixlEngine
from hicache_tier_storage.nixl_lane import NixlLane
from hicache_tier_storage.nixl_package import why_no_nixl
from hicache_tier_storage.registrations import Registrations
from hicache_tier_storage.slab import StoreFile

needs_nixl = [pytest.mark.nixl, pytest.mark.skipif(bool(why_no_nixl()), reason=why_no_nixl())]


class Owner:
    pass


class Pretended(Memory):
    """Pages in host memory that say they are on device 0."""

    def __init__(self, lengths, pages, **options):
        super().__init__(lengths, pages, **options)
        self.owner = Owner()
        region = (self._bytes.ctypes.data, max(1, self._bytes.size))
        self.device = DeviceMemory(0, (region,), self.owner)


@pytest.fixture
def stand_in(monkeypatch):
    stand_in_for_kvikio(monkeypatch)


@pytest.fixture
def posix_for_gds(monkeypatch):
    device_engines.posix_for_gds(monkeypatch)


class OnDevice(ByteEngineSuite):
    kind = "kvikio"

    def memory(self, lengths, pages, **options):
        return Pretended(lengths, pages, **options)

    def make_engine(self, directory):
        return device_engine(self.kind)


@pytest.mark.usefixtures("stand_in")
class TestKvikio(OnDevice):
    pass


@pytest.mark.usefixtures("posix_for_gds")
class TestNixl(OnDevice):
    pytestmark = needs_nixl
    kind = "nixl"


@pytest.fixture(params=["kvikio", pytest.param("nixl", marks=needs_nixl)])
def engine(request, stand_in, posix_for_gds):
    engine = device_engine(request.param, deadline_s=0.5)
    assert isinstance(engine, DeviceEngine)
    assert engine.device_mode
    yield engine
    engine.close()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path, [4096], slots=64)
    yield bench
    bench.close()


def filled(pages, **options):
    memory = Pretended([4096], pages, between=0, **options)
    memory.fill()
    return memory


def test_a_short_file_fails_its_pages_alone(engine, bench, monkeypatch):
    slabs = [bench.slab("whole"), bench.slab("cut")]
    places = [(slab, slot) for slab in slabs for slot in range(32)]
    memory = filled(64)
    assert not any(engine.write(bench.batch(memory, places)))
    os.truncate(slabs[1].path, 20 * 4096 + 100)
    monkeypatch.setattr(StoreFile, "check", lambda *_: None)
    target = Pretended([4096], 64, between=0)
    reasons = engine.read(bench.batch(target, places))
    good = 32 + 20
    assert not any(reasons[:good])
    assert all(reason.startswith("io_error") for reason in reasons[good:])
    assert all(target.page(page) == memory.page(page) for page in range(good))
    assert engine.retried_pages >= 12
    assert not any(engine.read(bench.batch(Pretended([4096], 32, between=0), places[:32])))


def test_a_transfer_that_never_ends(engine, bench, monkeypatch):
    slab = bench.slab()
    places = [(slab, slot) for slot in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(CuFile, "pwrite", lambda *_, **__: SimpleNamespace(done=lambda: False))
        if engine.name == "nixl":
            real = NixlLane.__init__

            def hung(lane, *arguments):
                real(lane, *arguments)
                lane._agent = SimpleNamespace(**{name: getattr(lane._agent, name) for name in METHODS})
                lane._agent.transfer = lane._agent.check_xfer_state = lambda handle: "PROC"

            patch.setattr(NixlLane, "__init__", hung)
        start = time.monotonic()
        reasons = engine.write(bench.batch(filled(4), places))
        assert time.monotonic() - start < 5
    assert [reason.partition(":")[0] for reason in reasons] == ["timeout"] * 4
    assert not any(engine.write(bench.batch(filled(4), places)))


METHODS = ("register_memory", "deregister_memory", "get_xfer_descs", "initialize_xfer")


@pytest.mark.nixl
@pytest.mark.skipif(bool(why_no_nixl()), reason=why_no_nixl())
def test_nixl_without_a_plug_in_refuses(bench):
    engine = NixlEngine(direct=False, threads=1)
    reasons = engine.write(bench.batch(filled(1), [(bench.slab(), 0)]))
    assert reasons == ["engine_error: no plug-in for GPU memory was found to work"]
    engine.close()


# -- registered memory -----------------------------------------------------------------------------------


class Ledger:
    def __init__(self):
        self.live = set()
        self.made = 0
        self.regions = Registrations(self.register, self.live.discard)

    def register(self, memory):
        self.made += 1
        self.live.add(self.made)
        return self.made


def memory_of(owner):
    return DeviceMemory(0, ((4096, 4096),), owner)


def test_once_an_owner_and_undone_when_it_goes():
    ledger = Ledger()
    first, second = Owner(), Owner()
    for _ in range(3):
        ledger.regions.cover(memory_of(first))
        ledger.regions.cover(memory_of(second))
    assert (ledger.made, len(ledger.live)) == (2, 2)
    del first
    gc.collect()
    assert len(ledger.live) == 1
    ledger.regions.close()
    assert not ledger.live
    ledger.regions.cover(memory_of(second))
    assert len(ledger.live) == 1
    ledger.regions.leak()
    del second
    gc.collect()
    assert len(ledger.live) == 1


def test_what_is_not_registered_is_tried_again_and_what_is_not_undone_is_logged(caplog):
    turns = iter([RuntimeError("no"), 1])

    def register(_):
        found = next(turns)
        if isinstance(found, Exception):
            raise found
        return found

    def undo(_):
        raise RuntimeError("gone already")

    regions, owner = Registrations(register, undo), Owner()
    with pytest.raises(RuntimeError, match="no"):
        regions.cover(memory_of(owner))
    regions.cover(memory_of(owner))
    regions.close()
    assert "was not deregistered" in caplog.text
