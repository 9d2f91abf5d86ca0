"""What an export takes, how it stops and goes on, and what it leaves alone."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hicache_tier.errors import InvalidArgumentError, NotAStoreError
from hicache_tier.keys import page_keys
from hicache_tier.testing.array_pool import ArrayPool, keys_of, page_bytes, write_page
from hicache_tier.testing.store_rig import tree
from hicache_tier_storage import open_store
from hicache_tier_storage.archive import (
    ArchiveError,
    ArchiveExistsError,
    NotAnArchiveError,
    Selection,
    export_archive,
    exporting,
    filling,
    import_archive,
    open_archive,
)
from hicache_tier_storage.record import keys_of as keys_of_rows


def archived(path):
    """Keys and bytes of every page of an archive, each checked."""
    found = {}
    with open_archive(path) as archive:
        for part in archive.parts:
            numbers = np.arange(part.facts.pages)
            out = np.zeros((len(numbers), part.facts.geometry.page_nbytes), np.uint8)
            assert part.read_pages(numbers, out) == [""] * len(numbers)
            keys = keys_of_rows(part.rows(numbers))
            assert len({*keys}) == len(keys)
            found |= {(str(part.facts.name), key): out[at].tobytes() for at, key in enumerate(keys)}
    return found


def keys_in(path):
    return {key for _, key in archived(path)}


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(exporting, "shard_pages", lambda _: 4)


# -- what is taken -----------------------------------------------------------------------------------------


def test_keys_and_namespaces(shop, tmp_path):
    root, keys = shop.fill(model="a")
    shop.fill(model="b")
    (first, second) = sorted(path.name for path in root.iterdir() if path.is_dir())
    some = frozenset(keys[3:7])
    report = export_archive(root, tmp_path / "keys", selection=Selection(keys=some))
    assert report.pages == 8
    assert report.left_out == {"not_selected": 32}
    assert keys_in(tmp_path / "keys") == some
    export_archive(root, tmp_path / "space", selection=Selection(namespaces=(first[:9],)))
    assert {name.partition("/")[0] for name, _ in archived(tmp_path / "space")} == {first}
    assert second not in {path.name for path in (tmp_path / "space").iterdir()}


def test_prompts(shop, tmp_path):
    tokens = [*range(50)]
    keys = page_keys(tokens, 8, adapter="lora")
    root, _ = shop.fill(keys=[*keys, *keys_of("other", 5)], adapter="lora")
    prompt = np.array(tokens[:33], np.uint32)
    export_archive(root, tmp_path / "archive", selection=Selection(prompts=(prompt,)))
    assert keys_in(tmp_path / "archive") == {*keys[:4]}
    with open_archive(tmp_path / "archive") as archive:
        (part,) = archive.parts
        rows = keys_of_rows(part.rows(np.arange(4)))
        ids = part.token_ids(np.arange(4))
        assert {key: ids[at].tolist() for at, key in enumerate(rows)} == {
            key: tokens[at * 8 : at * 8 + 8] for at, key in enumerate(keys[:4])
        }


@pytest.mark.parametrize("first", ["used", "newest"])
def test_whole_prefixes_up_to_a_size(shop, tmp_path, monkeypatch, first):
    """Three chains made one after another; the oldest is used last."""
    chains = [keys_of(f"chain{at}", 5) for at in range(3)]
    now = time.time()
    for at, chain in enumerate(chains):
        monkeypatch.setattr(time, "time_ns", lambda at=at: int((now - 1000 + 100 * at) * 1e9))
        monkeypatch.setattr(time, "time", lambda at=at: now - 1000 + 100 * at)
        root, _ = shop.fill(keys=chain)
    monkeypatch.setattr(time, "time", lambda: now)
    with open_store(root, shop.geometry, "page_first", model="m", capacity_bytes=4 << 20) as store:
        store.touch(chains[0][:3])
    monkeypatch.undo()
    selection = Selection(max_nbytes=8 * shop.geometry.page_nbytes, first=first)
    report = export_archive(root, tmp_path / "archive", selection=selection)
    assert (report.pages, report.left_out) == (8, {"over_size": 7})
    best, next_best = (chains[0][:3], chains[2]) if first == "used" else (chains[2], chains[1][:3])
    assert keys_in(tmp_path / "archive") == {*best, *next_best}


def test_ranks_of_a_namespace_keep_the_same_pages(shop, tmp_path):
    keys = keys_of("p", 8)
    for rank in range(2):
        root, _ = shop.fill(keys=keys, tp=(rank, 2))
    selection = Selection(max_nbytes=7 * shop.geometry.page_nbytes)
    export_archive(root, tmp_path / "archive", selection=selection)
    found = archived(tmp_path / "archive")
    by_rank = {name: {key for other, key in found if other == name} for name, _ in found}
    assert [*by_rank.values()] == [{*keys[:3]}] * 2


def test_dry_run_touches_nothing(shop, tmp_path):
    root, _ = shop.fill()
    before = tree(tmp_path)
    report = export_archive(root, tmp_path / "archive", dry_run=True)
    assert (report.pages, report.dry_run) == (20, True)
    assert tree(tmp_path) == before


def test_damaged_pages_stay_out(shop, tmp_path):
    root, _ = shop.fill()
    (slab,) = root.glob("*/*/kv/pages/c.0.*")
    with slab.open("r+b") as file:
        file.seek(5)
        file.write(b"\xff\xff\xff")
    report = export_archive(root, tmp_path / "archive")
    assert (report.pages, report.left_out) == (19, {"damaged": 1})
    assert len(archived(tmp_path / "archive")) == 19


def test_pages_of_several_writers_are_kept_once(shop, tmp_path):
    root, keys = shop.fill()
    with open_store(root, shop.geometry, "page_first", model="m", capacity_bytes=4 << 20, threads=1):
        shop.fill(keys=keys[:4])  # another writer's partition; pages that the first has are not stored again
        _, more = shop.fill(keys=keys_of("more", 3))
    report = export_archive(root, tmp_path / "archive")
    assert keys_in(tmp_path / "archive") == {*keys, *more}
    assert len(report.parts) == 1


# -- stopping and going on ---------------------------------------------------------------------------------


def test_a_stopped_export_goes_on(shop, tmp_path, small_shards, monkeypatch):
    root, keys = shop.fill(keys=keys_of("k", 41))
    calls = []

    def fill(*args, **options):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return filling.fill(*args, **options)

    monkeypatch.setattr(exporting, "fill", fill)
    with pytest.raises(KeyboardInterrupt):
        export_archive(root, tmp_path / "archive", threads=1)
    assert not (tmp_path / "archive").exists()
    with pytest.raises(NotAnArchiveError):
        open_archive(tmp_path / "archive.partial")
    monkeypatch.undo()
    monkeypatch.setattr(exporting, "shard_pages", lambda _: 4)
    with pytest.raises(ArchiveExistsError, match="codec"):
        export_archive(root, tmp_path / "archive", codec="zstd")
    report = export_archive(root, tmp_path / "archive")
    assert report.resumed_pages >= 4
    assert keys_in(tmp_path / "archive") == {*keys}
    assert not (tmp_path / "archive.partial").exists()
    assert not list((tmp_path / "archive").rglob(".hct*"))


def test_resuming_distrusts_what_was_damaged_meanwhile(shop, tmp_path, small_shards, monkeypatch):
    root, keys = shop.fill(keys=keys_of("k", 21))
    monkeypatch.setattr(exporting.PartWriter, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_archive(root, tmp_path / "archive", threads=1)
    monkeypatch.undo()
    monkeypatch.setattr(exporting, "shard_pages", lambda _: 4)
    shards = sorted((tmp_path / "archive.partial").rglob("pages/c.*"))
    assert len(shards) == 6
    os.truncate(shards[2], 100)
    (rows,) = (tmp_path / "archive.partial").rglob("1.rows")
    rows.write_bytes(rows.read_bytes()[:-1] + b"!")
    report = export_archive(root, tmp_path / "archive")
    assert report.resumed_pages == 4
    assert keys_in(tmp_path / "archive") == {*keys}


def test_a_store_that_changed_between_is_what_counts(shop, tmp_path, small_shards, monkeypatch):
    root, keys = shop.fill(keys=keys_of("k", 21))
    monkeypatch.setattr(exporting.PartWriter, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_archive(root, tmp_path / "archive", threads=1)
    monkeypatch.undo()
    monkeypatch.setattr(exporting, "shard_pages", lambda _: 4)
    _, more = shop.fill(keys=keys_of("more", 6))
    export_archive(root, tmp_path / "archive")
    assert keys_in(tmp_path / "archive") == {*keys, *more}


_SCRIPT = """
import sys, time
from hicache_tier_storage.archive import exporting, filling
exporting.shard_pages = lambda _: 4
def fill(*args):
    time.sleep(0.05)
    return filling.fill(*args)
exporting.fill = fill
sys.argv[1:1] = ["export"]
from hicache_tier.cli import main
main()
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_signals(shop, tmp_path, small_shards, sign):
    root, keys = shop.fill(keys=keys_of("k", 200))
    target = tmp_path / "archive"
    child = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(root), str(target)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(500):
        if len(list((tmp_path / "archive.partial").rglob("*.rows"))) >= 6:
            break
        time.sleep(0.01)
    child.send_signal(sign)
    _, said = child.communicate(timeout=30)
    assert child.returncode == (130 if sign == signal.SIGINT else -9)
    assert ("goes on" in said) == (sign == signal.SIGINT)
    assert "Traceback" not in said
    assert not target.exists()
    report = export_archive(root, target)
    assert report.resumed_pages >= 8
    assert keys_in(target) == {*keys}


def test_two_exports_to_one_place(shop, tmp_path, small_shards, monkeypatch):
    root, _ = shop.fill()
    inside, go = threading.Event(), threading.Event()

    def fill(*args, **options):
        inside.set()
        go.wait(10)
        return filling.fill(*args, **options)

    monkeypatch.setattr(exporting, "fill", fill)
    first = threading.Thread(target=export_archive, args=(root, tmp_path / "archive"))
    first.start()
    assert inside.wait(10)
    with pytest.raises(ArchiveExistsError, match="another process"):
        export_archive(root, tmp_path / "archive")
    go.set()
    first.join(10)
    assert len(archived(tmp_path / "archive")) == 20


# -- a store in use ----------------------------------------------------------------------------------------


def test_a_store_under_load(shop, tmp_path, small_shards):
    """Pages come and go while exports run; what is in an archive is what was stored under its key."""
    nbytes = shop.geometry.page_nbytes
    root = tmp_path / "live"
    options = {"model": "m", "capacity_bytes": 100 * 4096 + (64 << 10), "io_mode": "buffered", "threads": 1}
    over, put = threading.Event(), []

    def write(store):
        host = ArrayPool(shop.geometry, "page_first", 8)
        while not over.wait(0.01):
            keys = keys_of("live", 8, len(put))
            for i, key in enumerate(keys):
                write_page(host, i, page_bytes(key, nbytes))
            assert all(store.put(keys, host, range(8)))
            put.extend(keys)

    left_out = {}
    with open_store(root, shop.geometry, "page_first", **options) as store:
        writer = threading.Thread(target=write, args=(store,))
        writer.start()
        try:
            while len(put) < 200:
                time.sleep(0.005)
            for at in range(6):
                left_out |= export_and_check(root, tmp_path / f"archive{at}", nbytes)
        finally:
            over.set()
            writer.join(20)
        assert store.stats()["evictions"] > 0
    assert set(left_out) <= {"changed", "copies"}


def export_and_check(root, target, nbytes):
    report = export_archive(root, target, threads=2)
    assert report.live
    found = archived(target)
    assert len(found) == report.pages > 0
    assert all(data == page_bytes(key, nbytes) for (_, key), data in found.items())
    shards = list(target.rglob("pages/c.*"))
    assert len(shards) == -(-report.pages // 4)  # compact: only the last shard has room
    return report.left_out


def test_the_store_is_not_written_to(shop, tmp_path):
    root, _ = shop.fill()
    before = tree(root)
    export_archive(root, tmp_path / "archive")
    assert tree(root) == before


# -- places ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["archive", "archive.zip"])
def test_nothing_is_overwritten_unasked(shop, tmp_path, name):
    root, keys = shop.fill()
    target = tmp_path / name
    export_archive(root, target, selection=Selection(keys=frozenset(keys[:2])))
    before = tree(tmp_path)
    with pytest.raises(ArchiveExistsError, match="--overwrite"):
        export_archive(root, target)
    assert tree(tmp_path) == before
    export_archive(root, target, overwrite=True)
    assert keys_in(target) == {*keys}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "store"])


@pytest.mark.parametrize("name", ["mine", "mine.zip"])
def test_what_is_no_archive_is_never_overwritten(shop, tmp_path, name):
    root, _ = shop.fill()
    target = tmp_path / name
    if target.suffix:
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "zarr.json").write_text('{"attributes": {}}')
    before = tree(tmp_path)
    with pytest.raises(ArchiveExistsError, match="no archive"):
        export_archive(root, target, overwrite=True)
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(ArchiveExistsError, match="no archive"):
        export_archive(root, tmp_path / "link", overwrite=True)
    (tmp_path / "link").unlink()
    assert tree(tmp_path) == before


def test_a_folder_in_the_way_of_the_unfinished_archive(shop, tmp_path):
    root, _ = shop.fill()
    (tmp_path / "archive.partial").mkdir()
    (tmp_path / "archive.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(ArchiveExistsError, match="in the way"):
        export_archive(root, tmp_path / "archive", overwrite=True)
    assert (tmp_path / "archive.partial" / "thesis.txt").read_text() == "mine"


def test_wrong_arguments(shop, tmp_path):
    root, _ = shop.fill()
    before = tree(tmp_path)
    for error, options in [
        (InvalidArgumentError, {"codec": "fastest"}),
        (InvalidArgumentError, {"processes": 0}),
    ]:
        with pytest.raises(error):
            export_archive(root, tmp_path / "archive", **options)
    with pytest.raises(InvalidArgumentError):
        export_archive(root, "")
    with pytest.raises(InvalidArgumentError):
        Selection(first="last")
    with pytest.raises(ArchiveExistsError, match="inside the store"):
        export_archive(root, root / "archive")
    with pytest.raises(NotAStoreError):
        export_archive(tmp_path / "nothing", tmp_path / "archive")
    assert tree(tmp_path) == before


def test_object_stores(shop, tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed")
    root, keys = shop.fill()
    url = (tmp_path / "bucket" / "a").as_uri()
    report = export_archive(root, url, codec="fast")
    assert report.pages == 20
    with pytest.raises(ArchiveExistsError):
        export_archive(root, url)
    export_archive(root, url, overwrite=True)
    assert keys_in(url) == {*keys}
    assert not [path for path in (tmp_path / "bucket").rglob("*") if ".hct" in str(path)]
    assert import_archive(url, tmp_path / "new").imported == 20
    assert shop.read(tmp_path / "new", keys) == shop.read(root, keys)


def test_an_object_export_that_was_stopped_goes_on(shop, tmp_path, small_shards, monkeypatch):
    pytest.importorskip("obstore", reason="obstore is not installed")
    root, keys = shop.fill(keys=keys_of("k", 21))
    url = (tmp_path / "bucket").as_uri()
    monkeypatch.setattr(exporting.PartWriter, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_archive(root, url, threads=1)
    monkeypatch.undo()
    monkeypatch.setattr(exporting, "shard_pages", lambda _: 4)
    with pytest.raises(NotAnArchiveError):
        open_archive(url)
    assert export_archive(root, url).resumed_pages == 20
    assert keys_in(url) == {*keys}


def test_faults_of_an_object_store_are_told(shop, tmp_path):
    obstore = pytest.importorskip("obstore", reason="obstore is not installed")
    root, _ = shop.fill()
    with pytest.raises(ArchiveError, match="cannot be opened"):
        export_archive(root, "nowhere://bucket/a")
    url = (tmp_path / "bucket").as_uri()
    export_archive(root, url)
    with open_archive(url) as archive:

        class Broken:
            def get_range(self, *_, **__):
                raise obstore.exceptions.GenericError("the network is gone")

            head = get_range

        archive._source._store = Broken()
        out = np.zeros((20, shop.geometry.page_nbytes), np.uint8)
        with pytest.raises(ArchiveError, match="network is gone"):
            archive.parts[0].read_pages(np.arange(20), out)


def test_faults_of_an_object_store_are_told_in_words(shop, tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed")
    root, _ = shop.fill()
    (tmp_path / "file").write_text("")
    url = (tmp_path / "file" / "bucket").as_uri()
    told = []
    with pytest.raises(ArchiveError) as told_of_export:
        export_archive(root, url)
    told.append(str(told_of_export.value))
    with pytest.raises(ArchiveError) as told_of_import:
        open_archive((tmp_path / "bucket").as_uri())
    told.append(str(told_of_import.value))
    for text in told:
        assert "Debug source" not in text and "\n" not in text and "bucket" in text, text


def test_a_full_disk_is_told_and_the_export_goes_on_later(shop, tmp_path, small_shards, monkeypatch):
    root, keys = shop.fill(keys=keys_of("k", 41))
    calls = []

    def fill(*args, **options):
        calls.append(1)
        if len(calls) == 7:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return filling.fill(*args, **options)

    monkeypatch.setattr(exporting, "fill", fill)
    with pytest.raises(ArchiveError, match=r"No space left.*goes on"):
        export_archive(root, tmp_path / "archive", threads=1)
    monkeypatch.undo()
    monkeypatch.setattr(exporting, "shard_pages", lambda _: 4)
    assert export_archive(root, tmp_path / "archive").resumed_pages > 0
    assert keys_in(tmp_path / "archive") == {*keys}


def test_a_process_that_dies_is_told(shop, tmp_path, monkeypatch):
    root, keys = shop.fill()
    submit = exporting.Workers.submit
    monkeypatch.setattr(exporting.Workers, "submit", lambda workers, *_: submit(workers, os._exit, 9))
    with pytest.raises(ArchiveError, match=r"died.*goes on"):
        export_archive(root, tmp_path / "archive", processes=2)
    monkeypatch.undo()
    export_archive(root, tmp_path / "archive")
    assert keys_in(tmp_path / "archive") == {*keys}


def test_the_manifest_is_json_that_people_read(shop, tmp_path):
    root, _ = shop.fill()
    export_archive(root, tmp_path / "archive")
    manifest = json.loads((tmp_path / "archive" / "zarr.json").read_text())["attributes"]["hicache_tier"]
    assert (manifest["format"], manifest["version"]) == ("hct-archive", 1)
    (space,) = manifest["namespaces"].values()
    assert space["model"] == "m"
    assert [part["pages"] for part in manifest["parts"]] == [20]


def test_a_destination_is_where_dots_lead(shop, tmp_path):
    root, _ = shop.fill()
    export_archive(root, tmp_path / "kv.zarr")
    with pytest.raises(ArchiveExistsError, match="exists"):
        export_archive(root, tmp_path / "nodir" / ".." / "kv.zarr", dry_run=True)
    export_archive(root, f"{tmp_path}/nodir/../new.zarr")
    assert open_archive(tmp_path / "new.zarr").parts and not (tmp_path / "nodir").exists()
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(ArchiveExistsError, match="inside the store"):
        export_archive(tmp_path / "link", tmp_path / "link" / "archive")
    with pytest.raises(InvalidArgumentError, match="name of its own"):
        export_archive(root, f"{tmp_path}/..")
