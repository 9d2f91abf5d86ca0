"""Several directories as one store: pages on all, and a drive that fails takes out its own pages only."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hicache_tier.errors import (
    ClosedError,
    EngineUnavailableError,
    InvalidArgumentError,
    NotAStoreError,
    StoreError,
)
from hicache_tier.geometry import KVGeometry
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.faults import Fail, FaultyEngine
from hicache_tier.testing.store import PageStoreSuite
from hicache_tier.testing.store_rig import CAPACITY_NBYTES, GEOMETRY, StoreRig
from hicache_tier_storage import open_store, probe
from hicache_tier_storage.daemon_pool import DaemonPool
from hicache_tier_storage.placement import Look, Placement, split_capacity
from hicache_tier_storage.posix import PosixEngine
from hicache_tier_storage.roots import SeveralRoots
from hicache_tier_storage.store import PageStore

NAMES = ("one", "two", "three")


class RootsSuite(PageStoreSuite):
    def open_store(self, root):
        room = 3 * 256 * max(8192, self.geometry.page_nbytes)
        roots = [root / name for name in NAMES]
        return open_store(roots, self.geometry, self.layout, capacity_bytes=room, io_mode="buffered")


class TestThreeRoots(RootsSuite):
    pass


class TestLatentsOnThreeRoots(RootsSuite):
    geometry = KVGeometry.mla(num_layers=3, latent_dim=576, dtype="float8_e4m3fn", page_tokens=16)


class Rig(StoreRig):
    """A rig whose root is a list."""

    def __init__(self, *roots):
        super().__init__(roots[0])
        self.root = list(roots)


@pytest.fixture
def rig(tmp_path):
    rig = Rig(*(tmp_path / name for name in NAMES))
    yield rig
    rig.close()


@pytest.fixture
def keys():
    return keys_of("roots", 120)


def held(store):
    """The pages of each root."""
    return [set(one._core.index) for one in store._stores]


def test_pages_lie_on_all_roots_and_are_found_again(rig, keys):
    store = rig.open()
    assert rig.chain(store, keys) == ["stored"] * 120
    assert all(len(part) > 20 for part in held(store))
    assert sum(map(len, held(store))) == len(store) == 120
    assert rig.put(store, keys) == ["already_stored"] * 120
    assert rig.get(store, keys) == ["loaded"] * 120
    store.close()
    store = rig.open()
    assert store.match_prefix([*keys, b"no"]) == 120
    assert rig.get(store, keys) == ["loaded"] * 120


def test_roots_in_another_order_added_and_taken_away(rig, keys, tmp_path):
    store = rig.open()
    rig.put(store, keys)
    parts = held(store)
    store.close()
    rig.root = [rig.root[2], tmp_path / "four", rig.root[0]]
    store = rig.open()
    there = parts[0] | parts[2]
    assert [key in there for key in keys] == store.contains(keys)
    reasons = rig.put(store, keys)
    assert reasons == ["already_stored" if key in there else "stored" for key in keys]
    assert rig.get(store, keys) == ["loaded"] * 120
    store.close()
    rig.root = [tmp_path / name for name in (*NAMES, "four")]
    store = rig.open()
    assert rig.get(store, keys) == ["loaded"] * 120
    assert len(store) == 120


def test_each_is_an_ordinary_root(rig, keys, tmp_path):
    store = rig.open()
    rig.put(store, keys)
    part = held(store)[1]
    store.close()
    single = StoreRig(tmp_path / "two")
    assert [r == "loaded" for r in single.get(single.open(), keys)] == [key in part for key in keys]
    single.close()


def test_batches_are_under_way_on_all_roots_at_once(rig, keys):
    meeting = threading.Barrier(3, timeout=20)

    class Meets(PosixEngine):
        def write(self, batch):
            meeting.wait()
            return super().write(batch)

        def read(self, batch):
            meeting.wait()
            return super().read(batch)

    store = rig.open(engine=Meets(direct=False, threads=1))
    assert rig.put(store, keys) == ["stored"] * 120
    assert rig.get(store, keys) == ["loaded"] * 120


@pytest.mark.parametrize("error", ["disk_full", "io_error: Input/output error", "raises"])
def test_a_root_that_fails_takes_out_its_own_pages(rig, keys, tmp_path, error):
    how = RuntimeError("gone") if error == "raises" else error
    fault = Fail(how, lambda call: call.batch.files[0].path.is_relative_to(tmp_path / "two"))
    fault.on = False
    engine = FaultyEngine(PosixEngine(direct=False, threads=1), fault)
    store = rig.open(engine=engine)
    assert rig.put(store, keys[:60]) == ["stored"] * 60
    mine = held(store)[1]
    fault.on = True
    good = [key not in mine for key in keys[:60]]
    assert [reason == "loaded" for reason in rig.get(store, keys[:60])] == good
    reasons = rig.put(store, keys[60:])
    homes = [store._placement.home(key) for key in keys[60:]]
    assert [reason == "stored" for reason in reasons] == [home != 1 for home in homes]
    fault.on = False
    assert all(rig.put(store, keys))
    assert rig.get(store, keys) == ["loaded"] * 120


@pytest.mark.parametrize("when", ["whole", "slabs"])
def test_a_directory_that_is_removed(rig, keys, tmp_path, when):
    store = rig.open()
    rig.put(store, keys[:60])
    mine = held(store)[1]
    if when == "whole":
        shutil.rmtree(tmp_path / "two")
    else:
        for path in (tmp_path / "two").rglob("pages/c.*"):
            path.unlink()
    good = [key not in mine for key in keys[:60]]
    assert [reason == "loaded" for reason in rig.get(store, keys[:60])] == good
    rest = [key for key in keys[60:] if store._placement.home(key) != 1]
    assert rig.put(store, rest) == ["stored"] * len(rest)
    lost = [key for key in keys[60:] if store._placement.home(key) == 1]
    reasons = rig.put(store, lost)
    assert when == "whole" or reasons == ["stored"] * len(lost)
    assert rig.get(store, rest) == ["loaded"] * len(rest)
    store.close()


def test_a_root_that_cannot_be_opened_is_left_out(rig, keys, tmp_path, caplog):
    store = rig.open()
    rig.put(store, keys)
    parts = held(store)
    store.close()
    (tmp_path / "two").rename(tmp_path / "gone")
    (tmp_path / "blocked").write_text("a file")
    rig.root[1] = tmp_path / "blocked" / "two"
    store = rig.open()
    assert "left out" in caplog.text
    (row,) = [row for row in store.stats()["roots"] if "left_out" in row]
    assert row["root"] == str(rig.root[1])
    assert [reason == "loaded" for reason in rig.get(store, keys)] == [key not in parts[1] for key in keys]
    assert all(reason in {"stored", "already_stored"} for reason in rig.put(store, keys))


CALLS = {"stat": ["stat", "lstat"], "open": ["open"], "list": ["scandir", "listdir"], "make": ["mkdir"]}


def breaks(monkeypatch, bad, error, names):
    """Have system calls fail for whatever lies in one directory, as on a drive that is gone."""

    def failing(real):
        def call(path, *arguments, **options):
            folder = options.get("dir_fd", path if isinstance(path, int) else None)
            where = Path() if folder is None else Path(f"/proc/self/fd/{folder}").readlink()
            if (where / ("" if isinstance(path, int) else path)).is_relative_to(bad):
                raise OSError(error, os.strerror(error), str(path))
            return real(path, *arguments, **options)

        return call

    for name in names:
        monkeypatch.setattr(os, name, failing(getattr(os, name)))


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("call", [*CALLS, "all"])
def test_a_drive_that_does_not_work_is_left_out(memory_path, monkeypatch, call, error):
    bad, options = memory_path / "bad", {"capacity_bytes": "4 MiB", "deadline_s": None}
    roots = [memory_path / "one", bad]
    if call != "make":
        open_store(roots, GEOMETRY, "page_first", **options).close()
    names = CALLS.get(call) or [name for names in CALLS.values() for name in names]
    breaks(monkeypatch, bad, error, names)
    with open_store(roots, GEOMETRY, "page_first", **options) as store:
        assert list(store.stores) == [roots[0]]
        assert os.strerror(error) in store.left_out[bad]
    with pytest.raises(StoreError, match=os.strerror(error)) as caught:
        open_store(bad, GEOMETRY, "page_first", **options)
    assert type(caught.value) is StoreError
    assert str(bad) in str(caught.value)


def test_a_new_root_on_a_drive_that_is_read_only_is_left_out(memory_path, monkeypatch):
    """Unless an engine was insisted on, which does not work there."""
    roots = [memory_path / "one", memory_path / "bad" / "two"]
    roots[1].parent.mkdir()
    monkeypatch.setattr(probe, "_try", _only_reads(roots[1].parent, probe._try))
    for mode in ("auto", "buffered"):
        with open_store(roots, GEOMETRY, "page_first", capacity_bytes="4 MiB", io_mode=mode) as store:
            assert list(store.stores) == [roots[0]]
            assert "cannot be written: Read-only" in store.left_out[roots[1]]
    with pytest.raises(EngineUnavailableError, match="cannot be written: Read-only"):
        open_store(roots, GEOMETRY, "page_first", capacity_bytes="4 MiB", engine="posix")


def _only_reads(drive, real):
    refused = "the directory cannot be written: Read-only file system"
    return lambda directory, flags: refused if directory == drive else real(directory, flags)


def test_links_in_a_circle_are_left_out(memory_path):
    roots = [memory_path / "one", memory_path / "circle"]
    roots[1].symlink_to(roots[1])
    with open_store(roots, GEOMETRY, "page_first", capacity_bytes="4 MiB") as store:
        assert list(store.stores) == [roots[0]]
        assert "symbolic links" in store.left_out[roots[1]]
    with pytest.raises(
        StoreError, match="circle cannot be opened: Too many levels of symbolic links"
    ) as caught:
        open_store(roots[1], GEOMETRY, "page_first", capacity_bytes="4 MiB")
    assert type(caught.value) is StoreError


def test_none_can_be_opened(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError):
        Rig(tmp_path / "file" / "a", tmp_path / "file" / "b").open()


def test_an_interrupt_between_roots_leaves_none_at_work(rig, keys, monkeypatch):
    """Whoever is interrupted has the pages to itself again."""
    store, begun = rig.open(deadline_s=None), []
    rig.put(store, keys)

    def submit(pool, work, *arguments):
        if begun:
            raise KeyboardInterrupt
        begun.append(DaemonPool.submit(pool, lambda: (time.sleep(0.2), work(*arguments))[1]))
        return begun[0]

    for pool in store._pools:
        monkeypatch.setattr(pool, "submit", partial(submit, pool))
    with pytest.raises(KeyboardInterrupt):
        rig.get(store, keys)
    assert begun[0].done()


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "thesis.txt").write_text("x")
    with pytest.raises(NotAStoreError, match="two"):
        Rig(tmp_path / "one", tmp_path / "two").open()
    rig = StoreRig(tmp_path / "one")  # and nothing is held
    assert rig.open().stats()["partition"].split("/")[0].endswith("w0")
    rig.close()


@pytest.mark.parametrize("roots", [[], ["a", "a"], ["a", "a/b"], ["a/../b", "b"]])
def test_roots_must_be_some_and_apart(tmp_path, roots):
    rig = Rig(tmp_path)
    rig.root = [tmp_path / root for root in roots]
    with pytest.raises(InvalidArgumentError, match=r"apart|one directory at least"):
        rig.open()
    assert list(tmp_path.iterdir()) == []


def test_the_capacity_is_the_total(rig, keys, tmp_path):
    store = rig.open(capacity_bytes=3 * CAPACITY_NBYTES)
    shares = [one.capacity_nbytes for one in store._stores]
    assert sum(shares) <= 3 * CAPACITY_NBYTES < sum(shares) + 3
    for turn in range(12):
        assert rig.chain(store, keys_of(f"turn{turn}", 100)) == ["stored"] * 100
    used = sum(
        path.stat().st_blocks * 512
        for name in NAMES
        for path in (tmp_path / name).rglob("c.*")
        if path.is_file()
    )
    assert used <= 3 * CAPACITY_NBYTES + (1 << 20)
    stats = store.stats()
    assert stats["evictions"] > 0
    assert stats["put"]["stored"] == 1200
    assert stats["pages"] == len(store)


def test_capacity_is_shared_out_by_size(tmp_path, monkeypatch):
    sizes = {"one": 100, "two": 300}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=sizes[path.name]))
    found = {}
    for name in sizes:
        (tmp_path / name).mkdir()
        found[tmp_path / name] = Look.at(tmp_path / name).nbytes
    assert list(split_capacity(found, 4000).values()) == [1000, 3000]
    assert list(split_capacity(found, None).values()) == [None, None]
    assert list(split_capacity({**found, tmp_path: 0}, 6000).values()) == [1000, 3000, 2000], "it hangs"


def test_keys_are_spread_by_weight():
    placement = Placement([1, 3])
    homes = np.bincount([placement.home(key) for key in keys_of("weight", 4000)])
    assert abs(homes[1] / 4000 - 0.75) < 0.05
    assert {Placement([5]).home(key) for key in keys_of("weight", 50)} == {0}


def test_stats_name_every_root(rig, keys):
    store = rig.open()
    assert isinstance(store.on_this_thread, SeveralRoots)
    rig.put(store, keys)
    rig.get(store, [*keys, b"absent"])
    stats = store.stats()
    assert stats["put"] == {"stored": 120}
    assert stats["get"] == {"loaded": 120, "absent": 1}
    assert stats["engine"] == "posix"
    assert stats["mode"] == "buffered"
    assert len(stats["roots"]) == 3
    assert sum(row["pages"] for row in stats["roots"]) == stats["pages"] == 120


def test_pin_and_delete_find_their_root(rig, keys):
    store = rig.open()
    rig.put(store, keys[:10])
    assert [s.reason for s in store.pin([*keys[:10], b"x"])] == ["pinned"] * 10 + ["absent"]
    assert [s.reason for s in store.unpin(keys[:10])] == ["unpinned"] * 10
    assert [s.reason for s in store.delete(keys[:10])] == ["deleted"] * 10
    assert store.match_prefix(keys[:10]) == 0


def test_touch_tells_what_is_there(rig, keys):
    store = rig.open()
    rig.put(store, keys[:20])
    assert store.touch([*keys[:20], b"absent"]) == [True] * 20 + [False]


def test_every_method_of_a_store_is_there_for_several():
    """Nothing is inherited that would look into fields that only a store on one root has."""
    public = {name for name, value in vars(PageStore).items() if callable(value) and name[0] != "_"}
    own = vars(SeveralRoots).keys()
    assert public - own == {"tables"}


def test_a_reader_follows_several_roots(rig, keys):
    store = rig.open()
    rig.put(store, keys)
    reader = rig.open(read_only=True)
    assert rig.get(reader, keys) == ["loaded"] * 120
    with pytest.raises(InvalidArgumentError, match="read-only"):
        rig.put(reader, keys)


FORK = """
import os, sys
from pathlib import Path
from hicache_tier.errors import ClosedError
from hicache_tier.geometry import KVGeometry
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import StoreRig
rig = StoreRig(Path(sys.argv[1]))
rig.root = [Path(sys.argv[1]) / name for name in ("a", "b")]
store = rig.open()
keys = keys_of("fork", 20)
assert set(rig.put(store, keys)) == {"stored"}
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: rig.get(store, keys), lambda: rig.put(store, keys), lambda: store.delete(keys)):
        try:
            call()
        except ClosedError:
            refused += 1
    store.close()
    os._exit(refused)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), set(rig.get(store, keys)))
rig.close()
"""


def test_fork(tmp_path):
    run = subprocess.run([sys.executable, "-c", FORK, tmp_path], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["3", "{'loaded'}"], run.stderr


def test_closed(rig, keys):
    store = rig.open()
    store.close()
    with pytest.raises(ClosedError):
        rig.get(store, keys)


def test_full_file_systems(tmp_path, keys):
    """One root on a small tmpfs that others fill; needs the right to mount."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(small)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        (small / "ballast").write_bytes(bytes(1))
        rig = Rig(tmp_path / "large", small / "root")
        store = rig.open(capacity_bytes="40 MiB")
        (small / "ballast").write_bytes(bytes(5 << 19))
        reasons = rig.put(store, keys)
        homes = [store._placement.home(key) for key in keys]
        assert all(reason == "stored" for reason, home in zip(reasons, homes, strict=True) if home == 0)
        assert {reason for reason, home in zip(reasons, homes, strict=True) if home} <= {
            "disk_full",
            "stored",
        }
        stored = [key for key, reason in zip(keys, reasons, strict=True) if reason == "stored"]
        assert rig.get(store, stored) == ["loaded"] * len(stored)
        rig.close()
    finally:
        subprocess.run(["umount", str(small)], check=False)
