"""Rows of `bench storage` from GPU memory, where a pool in host memory stands for the device's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hicache_tier.bench import device_bench, large_file
from hicache_tier.bench.device_bench import DeviceBench, modes_for_devices
from hicache_tier.bench.errors import BenchError
from hicache_tier.bench.page_cache import Cache
from hicache_tier.bench.storage_cases import StorageCase, StorageShape
from hicache_tier.bench.storage_report import sheets
from hicache_tier.device_pool import DevicePool
from hicache_tier.testing.kvikio_stand_in import CuFile

CASE = StorageCase(8, 64 << 10)


@pytest.fixture
def pretended(monkeypatch):
    class Pool(DevicePool):
        @classmethod
        def empty(cls, geometry, num_pages, device="cpu", owned_layers=None):
            return DevicePool.empty(geometry, num_pages, "cpu", owned_layers)

    monkeypatch.setattr(device_bench, "DevicePool", Pool)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)


def bench(path, **options):
    shape = StorageShape(CASE, "buffered", Cache.WARM, checksums=True, threads=2, depth=3)
    return DeviceBench(path, shape, "posix", **options)


def test_rows(tmp_path, pretended):
    ours = bench(tmp_path)
    ours.check()
    rows = ours.rows(3)
    ours.close()
    assert list(tmp_path.iterdir()) == []
    assert [(row["engine"], row["direction"]) for row in rows] == [("gpu-posix", "put"), ("gpu-posix", "get")]
    for row in rows:
        assert row["gb_s"] > 0
        assert row["ratio_to_host_route"] > 0
        assert row["ratio_to_one_file"] is None
        assert 0 <= row["staging_share"] < 1
        assert 0 < row["submit_us_per_page"] < 1e5
    added = {"above_link": False, "ratio_to_posix": None}
    result = {"rows": [row | added for row in rows], "peers": [], "host": {}}
    assert "GPU memory" in sheets(result)[-1].title


def test_against_one_large_file(tmp_path, pretended, monkeypatch):
    used = []
    defaults = SimpleNamespace(set=lambda name, threads: used.append((name, threads)))
    kvikio = SimpleNamespace(CuFile=CuFile, defaults=defaults)
    monkeypatch.setattr(large_file, "kvikio_module", lambda: kvikio)
    for module in (large_file, device_bench):
        monkeypatch.setattr(module, "why_no_kvikio", str)
    ours = bench(tmp_path)
    rows = ours.rows(3)
    for row in rows:
        assert row["one_file_gb_s"] > 0
        assert row["ratio_to_one_file"] > 0
        assert row["one_file_threads"] in large_file.THREADS
        assert row["in_memory_share"] == row["one_file_in_memory_share"] == 1
    assert used[-1] == ("num_threads", rows[1]["one_file_threads"])
    monkeypatch.setattr(device_bench, "resident_share", lambda paths: float(paths[0].name == "one-file"))
    assert [row["ratio_to_one_file"] for row in ours.rows(1)] == [None, None]
    ours.close()
    assert list(tmp_path.iterdir()) == []


def test_other_bytes_are_no_result(tmp_path, pretended, monkeypatch):
    ours = bench(tmp_path)
    get = ours._store.get

    def wrong(keys, pool, pages):
        found = get(keys, pool, pages)
        if isinstance(pool, DevicePool):
            pool.layers[0][0].view(torch.uint8)[-1] ^= 1
        return found

    monkeypatch.setattr(ours._store, "get", wrong)
    with pytest.raises(BenchError, match="other bytes"):
        ours.check()
    ours.close()


def test_why_it_cannot_be_measured(monkeypatch):
    probed = [
        {"engine": "nixl", "mode": "POSIX aio", "usable": True},
        {"engine": "nixl", "mode": "GDS_MT", "usable": False},
        {"engine": "kvikio", "mode": "GPU memory", "usable": True},
    ]
    if not torch.cuda.is_available():
        assert [row["reason"] for row in modes_for_devices("nixl", probed)] == ["no CUDA device"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert modes_for_devices("nixl", probed) == [probed[1] | {"engine": "gpu-nixl"}]
    assert modes_for_devices("posix", probed)[0]["usable"]
