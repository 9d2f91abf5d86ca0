"""Which engine moves GPU pages, told by what the probe finds; no GPU is needed to choose."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest

from hicache_tier.errors import EngineUnavailableError
from hicache_tier_storage import accelerators, cufile_library, device_choice, kvikio_engine
from hicache_tier_storage.accelerators import Finding
from hicache_tier_storage.device_choice import DeviceEngines
from hicache_tier_storage.posix import PosixEngine


@pytest.fixture
def plain():
    engine = PosixEngine(direct=False, threads=1)
    yield engine
    engine.close()


@pytest.fixture
def found(monkeypatch):
    """What the probe finds."""
    state = SimpleNamespace(findings=[], gpudirect="no such driver", tries=0)

    def findings(*_, **__):
        state.tries += 1
        return state.findings

    monkeypatch.setattr(accelerators, "device_findings", findings)
    direct = accelerators.GPUDIRECT
    monkeypatch.setattr(
        accelerators, "kvikio_gpudirect", lambda _: finding("kvikio", direct, state.gpudirect)
    )
    device_choice._say_once.cache_clear()
    return state


def finding(engine, mode, why=""):
    return Finding(engine, mode, not why, why or "it works")


@pytest.mark.parametrize("asked", ["", "posix"])
def test_through_host_memory_without_asking_anybody(tmp_path, plain, found, asked):
    engines = DeviceEngines(tmp_path, asked, plain)
    assert engines.mode is None
    assert engines.get() is plain
    assert engines.mode == "staged in host memory, posix buffered"
    assert found.tries == 0


@pytest.mark.parametrize("asked", ["auto", "kvikio", "nixl"])
def test_encrypted_pages_go_through_host_memory(tmp_path, plain, found, asked):
    engines = DeviceEngines(tmp_path, asked, plain, encrypted=True)
    assert engines.get() is plain
    assert engines.mode == "staged and encrypted in host memory, posix buffered"
    assert found.tries == 0


@pytest.mark.parametrize("asked", ["kvikio", "nixl"])
def test_insisted_on(tmp_path, plain, found, asked):
    found.findings = [finding("kvikio", "GPU memory", "no udev"), finding("nixl", "GDS_MT", "it hung")]
    engines = DeviceEngines(tmp_path, asked, plain)
    why = "no udev" if asked == "kvikio" else "it hung"
    for _ in range(2):  # asked again where it did not work, and not where it did
        with pytest.raises(EngineUnavailableError, match=f"{asked}.*{why}.*'auto'"):
            engines.get()
    found.findings = [finding("kvikio", "GPU memory"), finding("nixl", "GDS_MT")]
    assert engines.get() is plain
    tries = found.tries
    assert engines.get() is plain
    assert found.tries == tries


def test_auto_says_once_why_it_stages_in_host_memory(tmp_path, plain, found, caplog):
    found.findings = [finding("kvikio", "GPU memory"), finding("nixl", "GDS_MT")]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert DeviceEngines(tmp_path, "auto", plain).get() is plain
    assert caplog.text.count("staged in host memory: GPU memory, GPUDirect: no such driver") == 1
    assert found.tries == 0


def test_auto_takes_kvikio_and_closes_it(tmp_path, plain, found, monkeypatch):
    closed = []
    own = SimpleNamespace(
        name="kvikio",
        mode="host memory",
        device_mode="GPU memory, compat mode OFF",
        write=list,
        read=list,
        close=lambda: closed.append(1),
    )
    monkeypatch.setattr(kvikio_engine, "KvikioEngine", lambda **_: own)
    found.gpudirect = ""
    engines = DeviceEngines(tmp_path, "auto", plain)
    assert engines.get() is own
    assert engines.mode == "kvikio GPU memory, compat mode OFF"
    engines.close()
    assert closed == [1]


def test_facts_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(cufile_library, "_NVIDIA_FS", tmp_path / "nvidia-fs")
    monkeypatch.setattr(cufile_library, "_UDEV", tmp_path / "udev")
    monkeypatch.setattr(cufile_library, "_BLOCK_DEVICES", tmp_path / "block")
    assert [said.partition(":")[0] for said in cufile_library.facts()] == [
        "no nvidia-fs driver",
        "no /run/udev",
    ]
    assert "not on an NVMe drive" in cufile_library.why_no_gpudirect(tmp_path)
    number = tmp_path.stat().st_dev
    slaves = tmp_path / "block" / f"{os.major(number)}:{os.minor(number)}" / "slaves"
    (slaves / "nvme0n1p2").mkdir(parents=True)
    assert cufile_library.why_no_gpudirect(tmp_path) == ""
    (slaves / "nvme0n1p2").rename(slaves / "sda2")
    assert cufile_library.why_no_gpudirect(tmp_path)
    (tmp_path / "udev").mkdir()
    (tmp_path / "nvidia-fs").mkdir()
    assert cufile_library.why_no_gpudirect(tmp_path) == ""
    assert cufile_library.facts() == []


def test_a_library_that_is_not_there(monkeypatch):
    monkeypatch.setattr(cufile_library, "NAME", "libcufile-of-nobody.so.0")
    cufile_library.preload_cufile.cache_clear()
    for call in (cufile_library.preload_cufile, cufile_library.forbid_compatibility):
        assert "install nvidia-cufile" in call()
    cufile_library.preload_cufile.cache_clear()


def test_which_row_of_the_probe_is_chosen_for_gpu_memory():
    rows = [finding("kvikio", accelerators.GPUDIRECT, "no"), finding("kvikio", "GPU memory, compat mode ON")]
    assert accelerators.chosen_for_devices(rows) is None
    rows[0] = finding("kvikio", accelerators.GPUDIRECT)
    assert accelerators.chosen_for_devices(rows) is rows[0]
