from __future__ import annotations

import ctypes
import gc
import logging
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache_tier.errors import ClosedError, DoubleFreeError, InvalidArgumentError, MemoryBudgetError
from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier.layout import Layout
from hicache_tier.memory import MemoryLimit

GEOMETRIES = {
    "mha": KVGeometry.mha(
        num_layers=3, num_kv_heads=2, head_dim=6, v_head_dim=4, dtype="float16", page_tokens=4
    ),
    "mla": KVGeometry.mla(num_layers=3, latent_dim=5, dtype="float8_e4m3fn", page_tokens=4),
    "indexer": KVGeometry.indexer(num_layers=3, bytes_per_token=132, page_tokens=4),
}
CASES = [
    (kind, layout)
    for kind in GEOMETRIES
    for layout in Layout
    if kind == "mha" or layout is not Layout.PAGE_HEAD
]
STORED = {
    ("mha", "layer_first"): {"k": (3, 4, 2, 6), "v": (3, 4, 2, 4)},
    ("mha", "page_first"): {"k": (4, 3, 2, 6), "v": (4, 3, 2, 4)},
    ("mha", "page_first_direct"): {"k": (3, 4, 2, 6), "v": (3, 4, 2, 4)},
    ("mha", "page_head"): {"k": (2, 4, 3, 6), "v": (2, 4, 3, 4)},
    ("mla", "layer_first"): {"latent": (3, 4, 5)},
    ("mla", "page_first"): {"latent": (4, 3, 5)},
    ("mla", "page_first_direct"): {"latent": (3, 4, 5)},
    ("indexer", "layer_first"): {"index": (3, 528)},
    ("indexer", "page_first"): {"index": (3, 528)},
    ("indexer", "page_first_direct"): {"index": (3, 528)},
}
PLENTY = (MemoryLimit("plenty", 1 << 60),)


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_segments_and_views_are_the_same_bytes(kind, layout):
    geometry = GEOMETRIES[kind]
    with HostPool(geometry, layout, 5, pinned=False) as pool:
        data = np.random.default_rng(1).integers(0, 256, pool.nbytes, dtype=np.uint8)
        ctypes.memmove(pool.address, data.ctypes.data, pool.nbytes)
        seen = []
        for page, fragments in enumerate(pool.segments(range(5))):
            views = pool.page_views(page)
            assert {name: tuple(view.shape) for name, view in views.items()} == STORED[kind, layout.value]
            assert all(view.dtype == geometry.dtype.torch for view in views.values())
            gathered = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in fragments)
            stored = b"".join(v.contiguous().view(torch.uint8).numpy().tobytes() for v in views.values())
            assert gathered == stored
            assert len(gathered) == pool.page_nbytes
            seen += fragments
        # No byte belongs to two fragments, and all lie within the pool.
        seen.sort()
        assert all(a + n <= b for (a, n), (b, _) in pairwise(seen))
        assert pool.address <= seen[0][0]
        assert sum(seen[-1]) <= pool.address + pool.nbytes


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_regions_start_at_memory_pages(kind, layout):
    with HostPool(GEOMETRIES[kind], layout, 5, pinned=False) as pool:
        assert pool.address % 4096 == 0
        for name in (c.name for c in pool.geometry.components):
            assert pool.component_tensor(name).data_ptr() % 4096 == 0
        with pytest.raises(InvalidArgumentError, match=r"component 'q' is not known. Allowed"):
            pool.component_tensor("q")


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_segment_table(kind, layout):
    with HostPool(GEOMETRIES[kind], layout, 5, pinned=False) as pool:
        pages = torch.tensor([4, 0, 4], dtype=torch.int32)
        addresses, nbytes = pool.segment_table(pages)
        assert addresses.dtype == nbytes.dtype == np.int64
        assert addresses.shape == (3, len(nbytes))
        assert not nbytes.flags.writeable
        assert [[*zip(row.tolist(), nbytes.tolist(), strict=True)] for row in addresses] == pool.segments(
            pages
        )
        assert pool.segment_table([])[0].shape == (0, len(nbytes))


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_no_fragment_crosses_a_seam_of_pinned_chunks(kind, layout):
    with HostPool(GEOMETRIES[kind], layout, 5000, pinned=False, chunk_nbytes=100 << 10) as pool:
        assert len(pool.chunks) > 2
        assert sum(size for _, size in pool.chunks) == pool.nbytes
        starts = np.array([at for at, _ in pool.chunks]) + pool.address
        addresses, nbytes = pool.segment_table(range(5000))
        first = np.searchsorted(starts, addresses, side="right")
        last = np.searchsorted(starts, addresses + nbytes - 1, side="right")
        assert (first == last).all()


def test_zero_copy():
    with HostPool(GEOMETRIES["mla"], "layer_first", 4, pinned=False) as pool:
        pool.page_views(2)["latent"].view(torch.uint8)[1, 3] = 9
        (_, second, _) = pool.segments([2])[0]
        assert ctypes.string_at(*second)[15:] == bytes([9] * 5)


def test_segment_table_takes_less_than_a_microsecond_a_page():
    geometry = KVGeometry.mha(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=64)
    with HostPool(geometry, "page_first", 256, pinned=False, limits=PLENTY) as pool:
        pages = torch.randperm(256)[:128]
        best = min(_timed(lambda: pool.segment_table(pages)) for _ in range(50))
    assert best / 128 < 1e-6


def _timed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_addresses_beyond_32_bits():
    # 8 GiB of address space, none of it touched.
    geometry = KVGeometry.mha(num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=16)
    pages = (8 << 30) // geometry.page_nbytes
    try:
        pool = HostPool(geometry, "layer_first", pages, pinned=False, limits=PLENTY)
    except MemoryBudgetError:
        pytest.skip("the kernel does not overcommit 8 GiB")
    with pool:
        addresses, nbytes = pool.segment_table([0, pages - 1])
        per_layer = 2 * 64 * 2 * 16
        assert nbytes.tolist() == [per_layer] * 8
        for part in range(2):
            for layer in range(4):
                region = part * pages * per_layer * 4 + layer * pages * per_layer
                column = addresses[:, part * 4 + layer] - pool.address
                assert column.tolist() == [region, region + (pages - 1) * per_layer]
        rows = pool.row_map()
        assert rows.address(7, pages - 1, 15) == pool.address + pages * geometry.page_nbytes - 256
        assert rows.address(7, pages - 1, 15) - rows.ptrs[0] > 1 << 32


def test_alloc_free_and_owners(host):
    assert (host.free_pages, host.owned_pages) == (16, 0)
    pages = host.alloc(8, "request 1")
    assert pages.tolist() == list(range(8))
    assert host.alloc(9) is None
    host.free(pages[2:4], "eviction")
    assert host.alloc(8, "request 2").tolist() == list(range(8, 16))
    with pytest.raises(
        DoubleFreeError, match="page 2 was freed already by eviction and is freed now by request 1"
    ):
        host.free(pages, "request 1")
    assert host.free_pages + host.owned_pages == host.num_pages == 16


@pytest.mark.parametrize("kind", ["mla", "indexer"])
def test_page_head_is_for_heads(kind):
    with pytest.raises(InvalidArgumentError, match="no head axis"):
        HostPool(GEOMETRIES[kind], "page_head", 4, pinned=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_pages": 0}, "num_pages"),
        ({"num_pages": -1}, "num_pages"),
        ({"num_pages": 2.0}, "num_pages"),
        ({"num_pages": True}, "num_pages"),
        ({"layout": "page_frist"}, "Did you mean 'page_first'"),
        ({"geometry": "mha"}, "KVGeometry"),
        ({"pinned": "maybe"}, "pinned"),
        ({"owned_layers": []}, "owned_layers"),
        ({"owned_layers": [0, 3]}, "owned_layers"),
        ({"owned_layers": [-1]}, "owned_layers"),
        ({"owned_layers": [1, 0]}, "owned_layers"),
        ({"owned_layers": [1, 1]}, "owned_layers"),
        ({"owned_layers": [1.0]}, "owned_layers"),
        ({"owned_layers": [True]}, "owned_layers"),
        ({"owned_layers": 2}, "owned_layers"),
        ({"chunk_nbytes": 0}, "chunk_nbytes"),
    ],
)
def test_wrong_arguments(change, message):
    arguments = {"geometry": GEOMETRIES["mha"], "layout": "page_first", "num_pages": 4, "pinned": False}
    with pytest.raises(InvalidArgumentError, match=message):
        HostPool(**arguments | change)


@pytest.mark.parametrize("pages", [[5], [-1], [0.5], torch.tensor([5])])
def test_segments_check_the_range(pages):
    with HostPool(GEOMETRIES["mla"], "page_first", 5, pinned=False) as pool:
        for call in (pool.segments, pool.segment_table):
            with pytest.raises(InvalidArgumentError, match="pages must"):
                call(pages)
        with pytest.raises(InvalidArgumentError, match="page must"):
            pool.page_views(5)


def test_sharded_pool_holds_rows_for_owned_layers_only():
    with HostPool(GEOMETRIES["mha"], "page_first", 4, pinned=False, owned_layers=[0, 2]) as pool:
        assert pool.geometry.num_layers == 2
        assert pool.owned_layers == (0, 2)
        assert pool.total_layers == 3
        assert pool.page_nbytes * 3 == GEOMETRIES["mha"].page_nbytes * 2
        assert len(pool.row_map().planes) == 4


def test_budget_is_checked_before_memory_is_touched(monkeypatch):
    monkeypatch.setattr("hicache_tier.memory.mmap.mmap", lambda *_, **__: pytest.fail("memory was mapped"))
    limits = [MemoryLimit("the cgroup v2 limit of 1 MiB in memory.max", 1 << 20)]
    with pytest.raises(MemoryBudgetError, match=r"needs 2.25 MiB and the cgroup v2 limit .* leaves 1 MiB"):
        HostPool(GEOMETRIES["mla"], "page_first", 39322, pinned=False, limits=limits)
    with pytest.raises(MemoryBudgetError, match=r"MemAvailable|cgroup"):
        HostPool(GEOMETRIES["mla"], "page_first", 1 << 50, pinned=False)


def test_closed(host):
    host.alloc(2)
    assert host.close()
    assert host.close()
    assert host.closed
    calls = [
        lambda: host.alloc(1),
        lambda: host.free([0]),
        lambda: host.segments([0]),
        lambda: host.segment_table([0]),
        lambda: host.page_views(0),
        lambda: host.component_tensor("k"),
        lambda: host.address,
        host.row_map,
        host.in_use().__enter__,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="is closed"):
            call()
    assert "closed" in repr(host)


def test_close_waits_for_users(host):
    entered, leave = threading.Event(), threading.Event()

    def use():
        with host.in_use() as pool:
            entered.set()
            leave.wait(10)
            ctypes.string_at(address, pool.nbytes)

    address = host.address
    thread = threading.Thread(target=use)
    thread.start()
    entered.wait(10)
    threading.Timer(0.2, leave.set).start()
    start = time.monotonic()
    assert host.close(timeout=10)
    assert 0.1 < time.monotonic() - start < 5
    thread.join()


def test_close_leaves_memory_to_a_user_that_does_not_end(host, caplog):
    address = host.address
    with host.in_use():
        with host.in_use():
            start = time.monotonic()
            assert not host.close(timeout=0.1)
            assert time.monotonic() - start < 5
            assert "has 2 users after 0.1 s; it stays mapped" in caplog.text
            with pytest.raises(ClosedError):
                host.alloc(1)
        assert ctypes.string_at(address, 1) == b"\0"
        assert _mapped(address)
    assert not _mapped(address)


def _mapped(address):
    bounds = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in bounds)


def test_memory_is_given_back_at_close_but_not_below_a_view(mha, caplog):
    caplog.set_level(logging.WARNING)
    pool = HostPool(mha, "page_first", 16, pinned=False)
    address, view = pool.address, pool.page_views(3)["k"]
    assert not pool.close()
    assert "until views of it are gone" in caplog.text
    view.fill_(1)
    assert _mapped(address)
    del view
    gc.collect()
    assert not _mapped(address)


def test_memory_is_given_back_when_dropped(mha):
    pool = HostPool(mha, "page_first", 16, pinned=False)
    address = pool.address
    pool.row_map()
    del pool
    gc.collect()
    assert not _mapped(address)


def test_repr_is_for_people():
    with HostPool(GEOMETRIES["mla"], "page_first", 1024, pinned=False) as pool:
        assert repr(pool) == "HostPool(mla, page_first, 1024 pages of 60 bytes, 60 KiB plain, 1024 free)"


CHILD = """
import os, signal, sys
from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
geometry = KVGeometry.mla(num_layers=4, latent_dim=576, dtype="uint8", page_tokens=64)
for _ in range(20):
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        pool = HostPool(geometry, "page_first", 64, pinned="auto")
        pool.component_tensor("latent").fill_(1)
        os.write(tell, b"x")
        signal.pause()
    assert os.read(told, 1) == b"x"
    # No name in the file system is behind any of its mappings.
    assert "/dev/shm" not in open(f"/proc/{pid}/maps").read()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


def test_sigkill_twenty_times_leaves_nothing_behind():
    def segments():
        # Folders are not shared memory: others that run tests here may make them.
        return {path for path in Path("/dev/shm").iterdir() if path.is_file()}

    before = segments()
    subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD], check=True, timeout=60)
    assert segments() <= before
