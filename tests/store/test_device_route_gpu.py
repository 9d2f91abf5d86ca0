"""The device route with real engines and GPU memory, in cuFile's compatibility mode or better.

Each engine that cannot move GPU memory here skips with the probe's reason.
"""

from __future__ import annotations

import os
import threading

import pytest
import torch

from hicache_tier import DevicePool, KVGeometry, open_store
from hicache_tier.errors import EngineUnavailableError
from hicache_tier.layout import Layout
from hicache_tier.testing.array_pool import ArrayPool, blank_pages, fill_pages, keys_of, pages_equal
from hicache_tier.testing.device_rig import ALIGNED, GEOMETRIES, BytePool, GpuMemory
from hicache_tier.testing.engine import Bench, ByteEngineSuite
from hicache_tier.testing.store import PageStoreSuite
from hicache_tier_storage import device_payload, kvikio_engine, nixl_device, staging
from hicache_tier_storage.accelerators import device_findings
from hicache_tier_storage.kvikio_engine import KvikioEngine
from hicache_tier_storage.nixl_engine import NixlEngine
from hicache_tier_storage.slab import StoreFile
from hicache_tier_storage.verification import verify_root

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ENGINES = [
    "posix",
    pytest.param("kvikio", marks=pytest.mark.gds),
    pytest.param("nixl", marks=[pytest.mark.gds, pytest.mark.nixl]),
]


def finding_of(engine, directory):
    """Return how an engine moves GPU memory in a directory, or skip."""
    mine = [found for found in device_findings(directory) if found.engine == engine]
    good = next((found for found in mine if found.usable), None)
    if good is None:
        pytest.skip("; ".join(f"{found.mode}: {found.reason}" for found in mine))
    return good


def check(engine, directory):
    if engine != "posix":
        finding_of(engine, directory)


class EngineOnGpu(ByteEngineSuite):
    """The suite, but for pages of odd pieces: those are gathered before an engine sees them."""

    def memory(self, lengths, pages, **options):
        return GpuMemory(lengths, pages, **options)

    @pytest.mark.parametrize("kind", ["one_run", "one_run_with_gap", "sectors", "halves", "k_then_v"])
    @pytest.mark.parametrize("shift", [0, 512], ids=["aligned", "off_by_512"])
    def test_round_trip(self, engine, tmp_path, kind, shift):
        super().test_round_trip(engine, tmp_path, kind, shift)

    @pytest.mark.parametrize("kind", ["one_run", "halves"])
    def test_hook_runs_once_a_page_before_its_write(self, engine, tmp_path, kind):
        super().test_hook_runs_once_a_page_before_its_write(engine, tmp_path, kind)

    @pytest.mark.parametrize("kind", ["one_run", "halves"])
    def test_hook_runs_once_a_page_after_its_read(self, engine, tmp_path, kind):
        super().test_hook_runs_once_a_page_after_its_read(engine, tmp_path, kind)


@pytest.mark.gds
class TestKvikio(EngineOnGpu):
    def make_engine(self, directory):
        finding_of("kvikio", directory)
        return KvikioEngine(direct=False, threads=4)


@pytest.mark.gds
@pytest.mark.nixl
class TestNixl(EngineOnGpu):
    def make_engine(self, directory):
        found = finding_of("nixl", directory)
        engine = NixlEngine(direct=True, threads=2)
        engine.device_mode = found.mode
        return engine


class StoreOnGpu(PageStoreSuite):
    engine = "posix"
    layout = Layout.PAGE_FIRST_DIRECT

    @pytest.fixture(autouse=True)
    def able(self, tmp_path):
        check(self.engine, tmp_path)

    def open_store(self, root):
        room = 256 * max(8192, self.geometry.page_nbytes)
        return open_store(root, self.geometry, self.layout, capacity_bytes=room, engine=self.engine)

    def pool(self):
        return BytePool(self.geometry, self.layout, 48, "cuda:0")


class TestThroughPinnedMemory(StoreOnGpu):
    pass


@pytest.mark.gds
class TestThroughKvikio(StoreOnGpu):
    engine = "kvikio"


@pytest.mark.gds
@pytest.mark.nixl
class TestThroughNixl(StoreOnGpu):
    engine = "nixl"


@pytest.fixture
def small(monkeypatch, request):
    """Halves of two slots and gaps between rows; with "fragments", pages that move fragment by fragment."""
    if request.param == "fragments":
        monkeypatch.setattr(device_payload, "FRAGMENT_NBYTES", 4096)
        monkeypatch.setattr("hicache_tier_storage.device_moves.STEP_NBYTES", 3 * ALIGNED.page_nbytes)
    else:
        monkeypatch.setattr(staging, "HALF_NBYTES", 2 * 12288)
        monkeypatch.setattr("hicache_tier_storage.device_moves.LEAST_STEP_NBYTES", 1)
    return 0 if request.param == "fragments" else 16


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("kind", GEOMETRIES)
@pytest.mark.parametrize("small", ["steps", "fragments"], indirect=True)
def test_both_routes_read_and_write_the_same_slots(tmp_path, kind, layout, small, engine):
    check(engine, tmp_path)
    geometry, keys = GEOMETRIES[kind], keys_of("same", 22)
    nbytes = geometry.page_nbytes
    host, device = ArrayPool(geometry, layout, 32), BytePool(geometry, layout, 32, "cuda:0", gap=small)
    back_to = [*range(21, 32), *range(11)]
    options = {"capacity_bytes": "16 MiB", "verify": "always", "engine": engine}
    with open_store(tmp_path / "root", geometry, layout, **options) as store:
        for there, back, part in ((device, host, keys[:11]), (host, device, keys[11:])):
            fill_pages(there, range(3, 14), part, nbytes)
            pages = torch.arange(3, 14, device="cuda")
            assert all(store.put(part, there, pages if there is device else pages.cpu()))
            blank_pages(back, range(32), nbytes)
            assert all(store.get(part, back, back_to[:11]))
            assert all(pages_equal(back, back_to[:11], part, nbytes))
        assert ("staged in host memory" in store.stats()["device_mode"]) == (engine == "posix")
    found = verify_root(tmp_path / "root")
    assert (found["pages"], found["damaged"], found["unverifiable"]) == (22, 0, 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_damaged_page_is_not_loaded(tmp_path, engine):
    check(engine, tmp_path)
    keys, device = keys_of("damage", 8), BytePool(ALIGNED, "page_first", 16, "cuda:0")
    fill_pages(device, range(8), keys, ALIGNED.page_nbytes)
    options = {"capacity_bytes": "16 MiB", "verify": "always", "engine": engine}
    with open_store(tmp_path / "root", ALIGNED, "page_first", **options) as store:
        assert all(store.put(keys, device, range(8)))
        slab, offset = _place(store, keys[3])
        with slab.open("r+b") as file:
            file.seek(offset + 777)
            byte = file.read(1)
            file.seek(offset + 777)
            file.write(bytes([byte[0] ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        status = store.get(keys, device, range(8, 16))
        assert [bool(verdict) for verdict in status] == [True] * 3 + [False] + [True] * 4
        assert status[3].kind == "checksum"
        del keys[3]
        assert all(pages_equal(device, [8, 9, 10, 12, 13, 14, 15], keys, ALIGNED.page_nbytes))


def _place(store, key):
    writer = store._core.writer
    number, slot = divmod(store._core.index[key], writer.facts.shape.slots)
    return writer.paths.slab(number, writer.facts.page_axes), slot * writer.facts.shape.stride


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_short_file_fails_its_pages_alone(tmp_path, monkeypatch, engine):
    """Cut after it was opened and checked, so that only the transfer can see it."""
    found = finding_of(engine, tmp_path)
    made = KvikioEngine(direct=False) if engine == "kvikio" else NixlEngine(direct=False)
    if engine == "nixl":
        made.device_mode = found.mode
    bench = Bench(tmp_path, [65536], slots=16)
    slab = bench.slab()
    memory, places = GpuMemory([65536], 16, between=0), [(slab, slot) for slot in range(16)]
    memory.fill()
    assert not any(made.write(bench.batch(memory, places)))
    os.truncate(slab.path, 10 * 65536 + 4096)
    monkeypatch.setattr(StoreFile, "check", lambda *_: None)
    target = GpuMemory([65536], 16, between=0)
    reasons = made.read(bench.batch(target, places))
    assert not any(reasons[:10])
    assert all(reasons[10:])
    assert all(target.page(page) == memory.page(page) for page in range(10))
    made.close()
    bench.close()


CALLS = {"kvikio": (kvikio_engine, "_DEVICE_TASK_NBYTES"), "nixl": (nixl_device, "_TASK_NBYTES")}


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_neighbouring_slots_move_in_one_call(tmp_path, monkeypatch, engine):
    """Pages of 24 KiB, put in one batch, leave and come back in calls of up to 2 MiB."""
    check(engine, tmp_path)
    module, name = CALLS[engine]
    count, nbytes, keys = 512, ALIGNED.page_nbytes, keys_of("run", 512)
    a_call = getattr(module, name) // nbytes
    calls, real = [], module.describe

    def describe(*arguments):
        found = real(*arguments)
        calls.extend((found.files[:, 1] // nbytes).tolist())
        return found

    monkeypatch.setattr(module, "describe", describe)
    device = BytePool(ALIGNED, "page_first", 2 * count, "cuda:0")
    fill_pages(device, range(count), keys, nbytes)
    options = {"capacity_bytes": "1 GiB", "verify": "always", "engine": engine}
    with open_store(tmp_path / "root", ALIGNED, "page_first", **options) as store:
        for move, at in ((store.put, range(count)), (store.get, range(count, 2 * count))):
            calls.clear()
            assert all(move(keys, device, at))
            assert sum(calls) == count
            # Steps of 8 MiB, each in calls as long as may be
            assert len(calls) <= -(-count // a_call) + -(-count * nbytes // (8 << 20))
        assert all(pages_equal(device, range(count, 2 * count), keys, nbytes))
        apart = [key for number, key in enumerate(keys) if number % 3]
        calls.clear()
        assert all(store.get(apart, device, range(len(apart))))
        assert set(calls) <= {1, 2}
        assert all(pages_equal(device, range(len(apart)), apart, nbytes))


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_ring_that_comes_round_many_times(tmp_path, engine):
    """Four times as many bytes as a ring holds, forwards and in another order, with checksums."""
    check(engine, tmp_path)
    geometry = KVGeometry.mha(num_layers=16, num_kv_heads=4, head_dim=128, dtype="bfloat16", page_tokens=32)
    assert geometry.page_nbytes == 1 << 20
    count, keys = 256, keys_of("round", 256)
    device = DevicePool.empty(geometry, 2 * count, "cuda:0")
    for part in (part for pair in device.layers for part in pair):
        raw = part.view(torch.uint8)
        raw[: len(raw) // 2].random_(0, 256)
        raw[len(raw) // 2 :].zero_()
    options = {"capacity_bytes": "1 GiB", "verify": "always", "engine": engine}
    order = torch.randperm(count).tolist()
    with open_store(tmp_path / "root", geometry, "page_first", **options) as store:
        assert all(store.put(keys, device, range(count)))
        assert all(store.get([keys[at] for at in order], device, [count + at for at in order]))
    for part in (part for pair in device.layers for part in pair):
        raw = part.view(torch.uint8)
        assert torch.equal(raw[: len(raw) // 2], raw[len(raw) // 2 :])


@pytest.mark.parametrize("engine", ENGINES)
def test_calls_side_by_side(tmp_path, engine):
    check(engine, tmp_path)
    nbytes, options = ALIGNED.page_nbytes, {"capacity_bytes": "64 MiB", "engine": engine}
    wrong = []
    with open_store(tmp_path / "root", ALIGNED, "page_first", **options) as store:

        def work(number):
            device = BytePool(ALIGNED, "page_first", 32, "cuda:0")
            for turn in range(4):
                keys = keys_of(f"{number}-{turn}", 16)
                fill_pages(device, range(16), keys, nbytes)
                good = all(store.put(keys, device, range(16))) and all(store.get(keys, device, range(16, 32)))
                if not good or not all(pages_equal(device, range(16, 32), keys, nbytes)):
                    wrong.append((number, turn))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_the_call_comes_after_what_the_stream_was_given(tmp_path):
    """Pages are written by work that is still queued when `put` is called."""
    keys, device = keys_of("stream", 4), BytePool(ALIGNED, "page_first", 8, "cuda:0")
    fill_pages(device, range(4), keys, ALIGNED.page_nbytes)
    copies = [tuple(part.clone() for part in pair) for pair in device.layers]
    for pair in device.layers:
        for part in pair:
            part.zero_()
    torch.cuda.synchronize()
    with open_store(tmp_path / "root", ALIGNED, "page_first", capacity_bytes="16 MiB") as store:
        store.put(keys_of("warm", 1), device, [7])
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            for pair, saved in zip(device.layers, copies, strict=True):
                for part, kept in zip(pair, saved, strict=True):
                    part.copy_(kept)
            assert all(store.put(keys, device, range(4)))
        assert all(store.get(keys, device, range(4, 8)))
    assert all(pages_equal(device, range(4, 8), keys, ALIGNED.page_nbytes))


@pytest.mark.parametrize("engine", ["kvikio", "nixl"])
def test_insisted_on_and_not_to_be_had(tmp_path, monkeypatch, engine):
    from hicache_tier_storage import accelerators

    check(engine, tmp_path)
    device, options = BytePool(ALIGNED, "page_first", 4, "cuda:0"), {"capacity_bytes": "16 MiB"}
    with open_store(tmp_path / "root", ALIGNED, "page_first", engine=engine, **options) as store:
        real = accelerators.device_findings(tmp_path)
        none = [found._replace(usable=False, reason="no such thing") for found in real]
        monkeypatch.setattr(accelerators, "device_findings", lambda *_, **__: none)
        with pytest.raises(EngineUnavailableError, match=f"{engine}.*no such thing.*auto"):
            store.put(keys_of("never", 1), device, [0])
        assert store.stats()["put"] == {}


def test_auto_says_which_way_it_takes(tmp_path):
    keys, device = keys_of("auto", 8), BytePool(ALIGNED, "page_first", 16, "cuda:0")
    fill_pages(device, range(8), keys, ALIGNED.page_nbytes)
    with open_store(tmp_path / "root", ALIGNED, "page_first", capacity_bytes="16 MiB") as store:
        assert store.stats()["device_mode"] is None
        assert all(store.put(keys, device, range(8)))
        assert all(store.get(keys, device, range(8, 16)))
        assert store.stats()["device_mode"].startswith(("staged in host memory, posix", "kvikio GPU memory"))
    assert all(pages_equal(device, range(8, 16), keys, ALIGNED.page_nbytes))
