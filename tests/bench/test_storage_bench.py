"""`bench storage`: cold figures or none, every engine and peer that works, the others with the reason."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hicache_tier.bench import peers
from hicache_tier.bench.bare_loop import BareLoop
from hicache_tier.bench.errors import BenchError
from hicache_tier.bench.link import DeviceLink, device_link
from hicache_tier.bench.page_cache import Cache, drop, resident_share, settle, ways, why_not_cold, write_out
from hicache_tier.bench.peers import PEERS
from hicache_tier.bench.storage_cases import SWEEP, StorageCase, StorageShape, shapes
from hicache_tier.bench.storage_rig import StorageRig
from hicache_tier.errors import InvalidArgumentError
from hicache_tier_storage.medium import filesystem
from hicache_tier_storage.nixl_package import why_no_nixl

SMALL = ("--mode", "buffered", "--repeats", "3", "--threads", "2", "--slots", "0")
ROW_KEYS = {"engine", "direction", "page_nbytes", "mode", "gb_s", "ratio_to_bare", "cpu_us_per_page"}
MEMORY = Path("/dev/shm")


@pytest.fixture
def storage(bench, tmp_path):
    """Run `bench storage` in a directory that is empty afterwards; return the result as data."""
    root = tmp_path / "root"
    root.mkdir()
    why = why_not_cold(root)
    if why:
        pytest.skip(f"figures of this directory are of memory: {why}")

    def run(*arguments, code=0, case="4x64KiB"):
        result = bench("storage", "--root", root, "--case", case, *SMALL, *arguments, "--json")
        assert result.exit_code == code, result.output
        assert list(root.iterdir()) == []
        return json.loads(result.stdout)

    return run


@pytest.mark.nixl
@pytest.mark.skipif(bool(why_no_nixl()), reason=why_no_nixl())
def test_all_engines(storage):
    found = storage("--engine", "all", "--peer", "none")
    rows = {(row["engine"], row["direction"], row["checksums"]): row for row in found["rows"]}
    assert {engine for engine, _, _ in rows} >= {"posix", "nixl"}
    for (engine, direction, sums), row in rows.items():
        base = rows["posix", direction, sums]
        assert row["ratio_to_posix"] == pytest.approx(row["ratio_to_bare"] / base["ratio_to_bare"])
        assert engine != "posix" or row["ratio_to_posix"] == 1
        assert row["cpu_us_per_page"] > 0
    assert {row["mode"] for row in found["left_out"]} >= {"GDS_MT", "GDS"}
    assert all(row["reason"] for row in found["left_out"])


def test_all_peers_that_are_here_move_the_same_bytes(storage):
    found = storage("--peer", "all")
    here = {name for name, kind in PEERS.items() if not kind.why_not()}
    assert {row["peer"] for row in found["peers"]} == here >= {"file-a-page", "zarr-python"}
    assert {row["peer"] for row in found["peers_left_out"]} == set(PEERS) - here
    for row in found["peers"]:
        assert (row["cache"], row["checksums"], row["direction"] in {"put", "get"}) == (
            "dropped",
            False,
            True,
        )
        assert row["gb_s"] > 0 < row["peer_gb_s"]


def test_depths_threads_and_mixes_are_rows_of_their_own(storage):
    arguments = ("--depth", 2, "--depth", 64, "--threads", 1, "--mix", 50, "--peer", "none")
    rows = storage(*arguments)["rows"]
    assert all(row.keys() >= ROW_KEYS for row in rows)
    seen = {(row["threads"], row["depth"], row["direction"], row["read_percent"]) for row in rows}
    ways_to_move = {("put", 0), ("get", 100), ("mixed", 50)}
    assert seen == {(t, d, *way) for t in (1, 2) for d in (2, 4) for way in ways_to_move}
    assert {row["cache"] for row in rows} == {"dropped"}


def test_warm_figures_are_given_when_asked_for_and_say_so(storage):
    rows = storage("--allow-cached", "--peer", "none")["rows"]
    assert {row["cache"] for row in rows} == {"dropped", "warm"}


def test_figures_above_the_link_are_refused(storage):
    found = storage("--link-gb-s", 1e-6, "--peer", "none", code=1)
    assert found["rows"] == []
    assert len(found["refused"]) == 4
    for row in found["refused"]:
        assert "above the device's link" in row["reason"]
        assert "gb_s" not in row
    found = storage("--link-gb-s", 1e-6, "--peer", "none", "--allow-cached")
    assert {row["above_link"] for row in found["rows"]} == {True}


def test_tables_for_people(bench, tmp_path):
    arguments = ("--root", tmp_path, "--case", "4x64KiB", *SMALL, "--slots", 100, "--allow-cached")
    arguments += ("--peer", "file-a-page")
    result = bench("storage", *arguments, "--markdown", tmp_path / "a.md")
    assert result.exit_code == 0, result.output
    for text in ("of posix", "file-a-page", "Opening a store of 100 pages", "memory, not the device"):
        assert text in result.stdout
    written = (tmp_path / "a.md").read_text()
    assert "| file-a-page | 64 KiB | buffered |" in written
    assert written.count("\n| ---") == 2


def test_plot(bench, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ("--root", tmp_path, "--case", "4x64KiB", "--case", "2x128KiB", *SMALL, "--mix", 50)
    assert bench("storage", *arguments, "--allow-cached", "--plot", tmp_path / "a.png").exit_code == 0
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_plot_without_matplotlib_names_the_extra(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = bench("storage", "--root", tmp_path, "--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "hicache-tier[plot]" in result.output


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--case", "four"), "PAGESxSIZE"),
        (("--case", "4x65KiB"), "not a multiple"),
        (("--case", "0x64KiB"), "above 0"),
        (("--layout", "rows"), "rows"),
        (("--mix", "100"), "100"),
    ],
)
def test_bad_input(bench, tmp_path, arguments, fault):
    result = bench("storage", "--root", tmp_path, "--peer", "none", *SMALL, *arguments)
    assert result.exit_code == 2
    assert fault in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_was_named_must_be_there(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(BenchError, match="fio is not installed"):
        peers.chosen_peers(["fio"])
    found, left_out = peers.chosen_peers([])
    assert [kind.name for kind in found] == ["file-a-page"]
    assert left_out == [{"peer": "fio", "reason": "fio is not installed"}]
    assert "fio" in {row["peer"] for row in peers.chosen_peers(["all"])[1]}
    assert peers.chosen_peers(["none"]) == ([], [])


def test_a_peer_with_wrong_bytes_is_no_peer(storage, monkeypatch):
    from hicache_tier.bench.peer_files import FileAPage

    whole = FileAPage.read

    def read(self):
        whole(self)
        self._targets[2][-1][7] ^= 1

    monkeypatch.setattr(FileAPage, "read", read)
    assert "file-a-page: page 2 came back with other bytes" in storage(code=2)["error"]["message"]


def test_files_are_seen_in_memory_and_out_of_it(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(os.urandom(1 << 20))
    if why_not_cold(tmp_path):
        pytest.skip("the page cache cannot be dropped here")
    assert resident_share([path]) == 1
    write_out([path])
    settle(tmp_path)
    drop([path])
    assert resident_share([path]) < 0.02
    path.read_bytes()
    assert resident_share([path]) == 1
    assert resident_share([]) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


@pytest.mark.skipif(
    not os.access(MEMORY, os.W_OK) or filesystem(MEMORY) != "tmpfs", reason="no file system in memory here"
)
def test_a_file_system_in_memory_is_refused(bench, tmp_path_factory):
    assert "still in memory" in why_not_cold(MEMORY)
    result = bench("storage", "--root", MEMORY, *SMALL)
    assert result.exit_code == 2
    assert "--allow-cached" in result.output
    assert ways(MEMORY, ["buffered"], allow_cached=True) == [("buffered", Cache.WARM)]


def test_an_engine_that_went_on_buffered_is_found_out(tmp_path):
    if why_not_cold(tmp_path):
        pytest.skip("the page cache cannot be dropped here")
    case = StorageCase(4, 65536)
    for mode, cache, caught in (
        ("buffered", Cache.BYPASSED, True),
        ("buffered", Cache.DROPPED, False),
        ("direct", Cache.BYPASSED, False),
    ):
        rig = StorageRig(tmp_path, StorageShape(case, mode, cache, False, 2, 4))
        try:
            rig.check()
            if caught:
                with pytest.raises(BenchError, match="100% of the pages went through"):
                    rig.check_bypass()
            else:
                rig.check_bypass()
        finally:
            rig.close()


def fake_disk(tmp_path, speeds):
    """Make a tree as sysfs has it: a mapped device over disks behind PCIe links."""
    device = tmp_path.stat().st_dev
    block = tmp_path / "dev-block"
    mapped = tmp_path / "devices/virtual/block/dm-0"
    (mapped / "queue").mkdir(parents=True)
    (mapped / "slaves").mkdir()
    block.mkdir()
    (block / f"{os.major(device)}:{os.minor(device)}").symlink_to(mapped)
    for number, (speed, width) in enumerate(speeds):
        port = tmp_path / f"devices/pci0000:00/0000:0{number}:00.0"
        disk = port / f"nvme/nvme{number}/nvme{number}n1"
        part = disk / f"nvme{number}n1p1"
        part.mkdir(parents=True)
        (disk / "queue").mkdir()
        (disk / "slaves").mkdir()
        if speed:
            (port / "current_link_speed").write_text(f"{speed}\n")
            (port / "current_link_width").write_text(f"{width}\n")
        (mapped / f"slaves/nvme{number}n1p1").symlink_to(part)
    return block


def test_the_link_is_the_sum_over_the_disks_below(tmp_path):
    link = device_link(tmp_path, block=fake_disk(tmp_path, [("16.0 GT/s PCIe", 4), ("5.0 GT/s PCIe", 2)]))
    assert link.gb_s == pytest.approx(16 * 128 / 130 * 4 / 8 + 5 * 0.8 * 2 / 8)
    assert "PCIe 16 GT/s x4" in link.source
    assert link.exceeded_by(9) and not link.exceeded_by(8)


def test_a_link_that_is_not_known_says_why(tmp_path):
    link = device_link(tmp_path, block=fake_disk(tmp_path, [("16.0 GT/s PCIe", 4), ("Unknown", 0), ("", 0)]))
    assert (link.gb_s, "no PCIe link" in link.source) == (None, True)
    assert device_link(tmp_path, block=tmp_path / "none").gb_s is None
    assert not DeviceLink(None, "").exceeded_by(1e9)


def test_the_sweep_is_64_kib_to_16_mib():
    sizes = [StorageCase.parse(text) for text in SWEEP]
    assert (sizes[0].page_nbytes, sizes[-1].page_nbytes) == (64 << 10, 16 << 20)
    assert {case.nbytes for case in sizes} == {128 << 20}
    for text in ("3", "x", "-1x64KiB", "1x"):
        with pytest.raises(InvalidArgumentError):
            StorageCase.parse(text)


def test_shapes_are_a_product_without_repeats():
    small, big = StorageCase(2, 65536), StorageCase(8, 65536)
    found = shapes([small, big], [("direct", Cache.BYPASSED)], (1, 2), (4, 99), "page_first")
    depths = {(shape.case, shape.threads, shape.checksums, shape.depth) for shape in found}
    assert len(found) == len(depths) == 2 * 2 * (1 + 2)
    assert {depth for case, _, _, depth in depths if case == small} == {2}


def test_the_bare_loop_moves_every_byte_in_batches(tmp_path):
    shape = StorageShape(StorageCase(7, 65536), "buffered", Cache.WARM, False, 3, 2)
    rig = StorageRig(tmp_path, shape)
    try:
        loop = rig.bare(rig.plain_file(), range(7))
        loop.close()
        loop = BareLoop(rig.plain_file(), rig.spare_buffers, direct=False, threads=3, depth=2)
        loop.read()
        rig.compare("the bare loop", range(7))
        os.truncate(rig.folder / "plain", 3 * 65536)
        with pytest.raises(BenchError, match="0 bytes of 65536"):
            loop.read()
        loop.close()
    finally:
        rig.close()
    assert list(tmp_path.iterdir()) == []
