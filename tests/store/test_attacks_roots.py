"""Roots under attack: locks that are kept, foreign names, leftovers, lowered caps, damaged groups, shares."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache_tier.errors import StoreError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import CAPACITY_NBYTES, StoreRig, paths_of, slab_of, writer_of
from hicache_tier_storage import asked_capacity, capacity, growth
from hicache_tier_storage.foreign import ForeignPages
from hicache_tier_storage.locks import RootBusyError
from hicache_tier_storage.state import StateBlock

SLAB_NBYTES = 16 * 8192 + 16 * 16 + 4  # of the rig's geometry and capacity
TABLE_NBYTES = 16 * 128


@pytest.fixture
def shop(memory_path):
    shop = StoreRig(memory_path / "root")
    yield shop
    shop.close()


@contextmanager
def kept(lock):
    """Hold a lock as a process that stands still does."""
    fd = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def held(root):
    """Bytes of slabs and tables, finished or not."""
    files = (path for folder in ("pages", "slots") for path in root.glob(f"*/*/*/{folder}/c.*"))
    return sum(path.lstat().st_size for path in files if path.is_file())


def array_length(store, name):
    return json.loads((paths_of(store).root / name / "zarr.json").read_bytes())["shape"][0]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_until(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


# -- locks ---------------------------------------------------------------------------------------------


def test_a_process_that_stands_still_in_the_root_stops_nobody(shop, keys, monkeypatch):
    assert growth.GROW_PATIENCE_S <= 2
    assert capacity.OPEN_PATIENCE_S <= 10
    monkeypatch.setattr(growth, "GROW_PATIENCE_S", 0.3)
    monkeypatch.setattr(capacity, "OPEN_PATIENCE_S", 0.3)
    store = shop.open()
    assert set(shop.put(store, keys[:16])) == {"stored"}
    with kept(shop.root / ".hct.lock"):
        started = time.monotonic()
        store.pin(keys[:16])
        assert shop.put(store, keys[16:20]) == ["root_busy"] * 4
        assert store.stats()["put"]["root_busy"] == 4
        assert shop.get(store, keys[:16]) == ["loaded"] * 16
        with pytest.raises(RootBusyError, match=f"process {os.getpid()} for 0.3 s"):
            shop.open()
        assert time.monotonic() - started < 2
        started = time.monotonic()
        store.close(1)
        assert time.monotonic() - started < 2
    assert shop.open().stats()["pages"] == 16


def test_a_put_goes_on_once_the_roots_lock_is_free(shop, keys, monkeypatch):
    monkeypatch.setattr(growth, "GROW_PATIENCE_S", 0.1)
    monkeypatch.setattr(growth, "_RETRY_S", 0.1)
    store = shop.open()
    with kept(shop.root / ".hct.lock"):
        assert shop.put(store, keys[:4]) == ["root_busy"] * 4
    wait_until(lambda: shop.put(store, keys[:4])[0].endswith("stored"), 2)


# -- names ---------------------------------------------------------------------------------------------


def test_foreign_files_named_almost_like_slabs_are_never_removed(shop, keys):
    old = shop.open()
    shop.put(old, keys[:200])
    paths = paths_of(old)
    old.close()
    names = ["c.0.backup", "c.3.0.0.0.0.0.orig", "c.0.0", "c.01.0.0.0.0.0", "c.1.0.0.0.0.0.0.0", "c.x.0"]
    for name in names:
        (paths.pages / name).write_bytes(b"precious")
    (paths.slots / "c.0.0.copy").write_bytes(b"precious")
    other = shop.open(model="other")
    assert set(shop.put(other, keys[:200])) == {"stored"}
    assert len(paths.slab_numbers()) < 13  # its own slabs went
    assert all((paths.pages / name).read_bytes() == b"precious" for name in names)
    assert (paths.slots / "c.0.0.copy").exists()


def test_every_slab_left_has_its_table_after_foreign_files_were_passed_over(shop, keys):
    old = shop.open()
    shop.put(old, keys[:200])
    for number in range(13):
        (paths_of(old).pages / f"c.{number}.0").write_bytes(b"")  # a name of too few axes
    old.close()
    other = shop.open(model="other")
    shop.put(other, keys[:100])
    slabs = {int(path.name.split(".")[1]) for path in paths_of(old).pages.glob("c.*.0.0")}
    assert slabs == set(paths_of(old).slab_numbers())
    assert shop.open().stats()["damage"] == []


def test_a_directory_named_like_a_slab_is_passed_over(shop, keys):
    old = shop.open()
    shop.put(old, keys[:200])
    paths, axes = paths_of(old), writer_of(old).facts.page_axes
    old.close()
    paths.slab(99, axes).mkdir()
    paths.table(99).mkdir()
    (paths.pages / "c.98.dir").mkdir()
    other = shop.open(model="other")
    assert set(shop.put(other, keys[:200])) == {"stored"}
    assert paths.slab(99, axes).is_dir()


def test_a_slab_that_cannot_be_removed_is_reported_and_passed_over(shop, keys, monkeypatch, caplog):
    old = shop.open()
    shop.put(old, keys[:200])
    old.close()
    real = capacity.remove_inside

    def remove(path, depth):
        if path == slab_of(old, 0):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        real(path, depth)

    other = shop.open(model="other")
    monkeypatch.setattr(capacity, "remove_inside", remove)
    assert shop.put(other, keys[:240]).count("stored") > 200
    assert slab_of(old, 0).exists()
    assert caplog.text.count("cannot be removed") == 1


def test_a_directory_in_the_place_of_the_next_slab_costs_that_number(shop, keys):
    store = shop.open()
    paths, axes = paths_of(store), writer_of(store).facts.page_axes
    paths.pages.joinpath(paths.slab(0, axes).name + ".tmp").mkdir()
    paths.slab(1, axes).mkdir()
    paths.slots.joinpath("c.2.0").mkdir()
    assert set(shop.put(store, keys[:60])) == {"stored"}
    assert sorted(writer_of(store).slabs) == [3, 4, 5, 6]
    assert sum("is a directory" in line for line in store.stats()["damage"]) == 3
    store.close()
    assert shop.open().stats()["pages"] == 60


def test_temporary_files_are_not_written_through_links(shop, keys, memory_path):
    store = shop.open()
    precious = memory_path / "precious"
    precious.write_bytes(b"p" * 100)
    paths, axes = paths_of(store), writer_of(store).facts.page_axes
    for path in (paths.slab(0, axes), paths.table(0), paths.state):
        path.with_name(path.name + ".tmp").symlink_to(precious)
    assert set(shop.put(store, keys[:3])) == {"stored"}
    store.close()
    assert precious.read_bytes() == b"p" * 100
    assert shop.open().match_prefix(keys) == 3


def test_a_link_in_the_place_of_the_journal_is_replaced(shop, keys, memory_path):
    store = shop.open()
    shop.put(store, keys[:20])
    journal = paths_of(store).journal
    store.close()
    journal.rename(memory_path / "elsewhere")
    journal.symlink_to(memory_path / "elsewhere")
    store = shop.open()
    assert shop.get(store, keys[:20]) == ["loaded"] * 20
    assert journal.is_file()
    assert not journal.is_symlink()
    assert shop.open(read_only=True).match_prefix(keys) == 20


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_part_of_a_store_behind_a_link_is_refused(shop, keys, memory_path, level):
    store = shop.open()
    shop.put(store, keys[:4])
    folder = [paths_of(store).root, *paths_of(store).root.parents][2 - level]
    store.close()
    folder.rename(memory_path / "elsewhere")
    folder.symlink_to(memory_path / "elsewhere")
    with pytest.raises(StoreError, match="is a symbolic link"):
        shop.open()
    if level == 0:
        with pytest.raises(StoreError, match="is a symbolic link"):
            shop.open(read_only=True)
    folder.unlink()
    (memory_path / "elsewhere").rename(folder)
    assert shop.open().match_prefix(keys) == 4


# -- the cap -------------------------------------------------------------------------------------------


def test_slabs_with_high_numbers_outlive_a_lowered_cap(shop, keys):
    store = shop.open()
    shop.put(store, keys[:240])
    store.close()
    for number in range(7):
        slab_of(store, number).unlink()
        paths_of(store).table(number).unlink()
    low = 9 * (SLAB_NBYTES + TABLE_NBYTES)
    for _ in range(3):
        store = shop.open(capacity_bytes=low)
        assert store.stats()["pages"] == 128
        assert store.stats()["damage"] == []
        state = StateBlock.unpack(paths_of(store).state.read_bytes(), "")
        assert array_length(store, "pages") == array_length(store, "slots") == state.capacity == 240
        store.close()
    store = shop.open(capacity_bytes=low)
    assert shop.put(store, keys_of("more", 40)) == ["stored"] * 40
    assert len(writer_of(store).slabs) == 9
    assert held(shop.root) <= low
    store.close()
    lower = 4 * (SLAB_NBYTES + TABLE_NBYTES)
    for _ in range(2):
        store = shop.open(capacity_bytes=lower)
        assert held(shop.root) <= lower
        assert store.stats()["pages"] == 64
        assert array_length(store, "pages") >= (max(writer_of(store).slabs) + 1) * 16
        store.close()


def test_arrays_that_were_left_too_short_are_made_whole(shop, keys):
    store = shop.open()
    shop.put(store, keys[:100])
    store.close()
    for name in ("pages", "slots"):
        file = paths_of(store).root / name / "zarr.json"
        document = json.loads(file.read_bytes())
        document["shape"][0] = 16
        file.write_text(json.dumps(document))
    store = shop.open()
    assert store.match_prefix(keys) == 100
    assert array_length(store, "pages") == array_length(store, "slots") == writer_of(store).capacity >= 112


def test_the_default_capacity_stays_what_it_was(memory_path, keys, monkeypatch):
    disk = 8 << 20

    def disk_usage(_):
        used = sum(path.stat().st_blocks * 512 for path in memory_path.rglob("*") if path.is_file())
        return SimpleNamespace(total=disk, used=used, free=disk - used)

    monkeypatch.setattr(asked_capacity.shutil, "disk_usage", disk_usage)
    shop = StoreRig(memory_path / "root")
    seen = set()
    for turn in range(3):
        store = shop.open(capacity_bytes=None)
        if not turn:
            shop.put(store, keys[:240])
        seen.add((store.stats()["capacity_bytes"], store.stats()["pages"]))
        store.close()
    assert seen == {(disk // 4, 240)}


def test_what_a_writer_killed_while_growing_left_counts_and_goes_first(shop, keys):
    old = shop.open(model="old")
    shop.put(old, keys[:16])
    paths, axes = paths_of(old), writer_of(old).facts.page_axes
    old.close()
    for number in range(1, 14):
        (paths.pages / (paths.slab(number, axes).name + ".tmp")).write_bytes(bytes(SLAB_NBYTES))
        paths.table(number).write_bytes(bytes(TABLE_NBYTES))
    store = shop.open()
    assert store._budget.used_nbytes() == held(shop.root) == 14 * (SLAB_NBYTES + TABLE_NBYTES)
    assert set(shop.put(store, keys[:200])) == {"stored"}
    assert held(shop.root) <= CAPACITY_NBYTES
    assert not list(paths.pages.glob("*.tmp"))
    assert shop.open(model="old").match_prefix(keys) == 16  # what is whole stays longest


def test_a_slab_that_vanishes_during_the_count_hides_no_other(shop, keys, monkeypatch):
    busy = shop.open()
    shop.put(busy, keys[:240])
    store = shop.open()
    full = store._budget.used_nbytes()
    real = os.scandir

    class Listing:
        def __init__(self, path):
            self.inner = real(path)

        def __enter__(self):
            entries = sorted(self.inner, key=lambda entry: "c.14." not in entry.name)
            if entries and "c.14." in entries[0].name and slab_of(busy, 14).exists():
                with busy._core.lock:
                    assert busy._core.shed()
            return iter(entries)

        def __exit__(self, *_):
            self.inner.close()

    monkeypatch.setattr(capacity.os, "scandir", Listing)
    counted = store._budget.used_nbytes()
    monkeypatch.undo()
    assert not slab_of(busy, 14).exists()
    assert store._budget.used_nbytes() <= counted <= full
    assert full - store._budget.used_nbytes() == SLAB_NBYTES + TABLE_NBYTES


# -- damage --------------------------------------------------------------------------------------------


def cut(file):
    file.write_bytes(file.read_bytes()[:-30])


def other_slots(file):
    document = json.loads(file.read_bytes())
    document["attributes"]["hicache_tier"]["slots_per_slab"] = 32
    file.write_text(json.dumps(document))


@pytest.mark.parametrize("harm", [cut, other_slots, os.unlink])
def test_a_damaged_group_is_written_again_from_the_state_block(shop, keys, harm):
    store = shop.open()
    shop.put(store, keys[:40])
    group = paths_of(store).root / "zarr.json"
    before = group.read_bytes()
    store.close()
    harm(group)
    store = shop.open(capacity_bytes=4 * CAPACITY_NBYTES)  # a new partition's slabs would be larger
    assert any("group" in line for line in store.stats()["damage"])
    assert shop.get(store, keys[:40]) == ["loaded"] * 40
    store.close()
    store = shop.open()
    assert group.read_bytes() == before
    assert store.stats()["damage"] == []
    assert shop.get(store, keys[:40]) == ["loaded"] * 40


def test_a_partition_that_nothing_describes_is_dropped_and_reported(shop, keys):
    store = shop.open()
    shop.put(store, keys[:40])
    store.close()
    cut(paths_of(store).root / "zarr.json")
    cut(paths_of(store).state)
    store = shop.open()
    assert store.stats()["pages"] == 0
    assert any("3 slabs were dropped" in line for line in store.stats()["damage"])
    assert set(shop.put(store, keys[:40])) == {"stored"}


def test_an_opening_that_runs_out_of_descriptors_leaves_nothing_behind(shop, keys, monkeypatch):
    other = shop.open(model="other")
    shop.put(other, keys[:4])
    keepers = [thread for thread in threading.enumerate() if thread.name == "hct-keeper"]
    before = open_files()

    def refresh(_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(ForeignPages, "refresh", refresh)
        for _ in range(3):
            with pytest.raises(StoreError, match="cannot be opened: Too many open files"):
                shop.open()
    assert open_files() == before
    assert [thread for thread in threading.enumerate() if thread.name == "hct-keeper"] == keepers
    assert shop.open().stats()["partition"].endswith("-w0/kv")


# -- shares --------------------------------------------------------------------------------------------


def test_a_late_writer_has_a_slab_within_two_seconds_and_its_share_soon(shop, keys):
    first = shop.open()
    shop.put(first, keys[:250])
    late = [shop.open(), shop.open()]
    put = [0, 0]

    def slabs(number):
        store = late[number]
        with suppress(IndexError):
            put[number] += 4
            shop.put(store, keys_of(f"late{number}", 4, put[number]))
        shop.put(first, keys_of("first", 4, put[number]))  # which would take what it gives up
        return len(writer_of(store).slabs)

    wait_until(lambda: min(slabs(0), slabs(1)) >= 1, 2.5)
    wait_until(lambda: min(slabs(0), slabs(1)) >= 4, 6)
    assert len(writer_of(first).slabs) >= 5
    assert held(shop.root) <= CAPACITY_NBYTES


def test_who_holds_more_waits_for_who_holds_less(shop, keys, monkeypatch):
    rich, poor = shop.open(model="rich"), shop.open(model="poor")
    shop.put(rich, keys[:100])
    slab = SLAB_NBYTES + TABLE_NBYTES
    with rich._budget.lock():
        assert not rich._budget.must_wait(paths_of(rich))
        assert poor._budget.ask_for_room(slab, paths_of(poor))
        assert rich._budget.must_wait(paths_of(rich))
        assert not poor._budget.must_wait(paths_of(poor))
    before = len(writer_of(rich).slabs)
    shop.put(rich, keys[100:140])
    assert len(writer_of(rich).slabs) == before
    with rich._budget.lock():
        monkeypatch.setattr(capacity, "_ASKING_NS", 0)  # it asks no more
        assert not rich._budget.must_wait(paths_of(rich))


def test_who_holds_its_share_asks_nobody(shop, keys):
    rich, poor = shop.open(model="rich"), shop.open(model="poor")
    shop.put(rich, keys[:240])
    slab = SLAB_NBYTES + TABLE_NBYTES
    with rich._budget.lock():
        assert not rich._budget.ask_for_room(slab, paths_of(rich))
        assert not (shop.root / ".hct.demand").exists()
        assert poor._budget.ask_for_room(slab, paths_of(poor))
        shutil.rmtree(shop.root / poor.identity.namespace)


def test_a_demand_is_not_hidden_by_another(shop, keys):
    rich, poor, third = (shop.open(model=model) for model in ("rich", "poor", "third"))
    for store in (rich, poor, third):
        store._keeper.stop(5)
    shop.put(rich, keys[:200])
    slab = SLAB_NBYTES + TABLE_NBYTES
    with rich._budget.lock():
        poor._budget.ask_for_room(slab, paths_of(poor))
        third._budget.ask_for_room(slab, paths_of(third))
    assert rich._budget.excess(paths_of(rich))
    assert not poor._budget.excess(paths_of(poor))
    rich._budget.demand_met()
    assert not rich._budget.excess(paths_of(rich))
    with rich._budget.lock():
        third._budget.ask_for_room(slab, paths_of(third))
    with kept(shop.root / ".hct.lock"):
        assert not rich._budget.excess(paths_of(rich))  # it cannot be told now
    assert rich._budget.excess(paths_of(rich))
