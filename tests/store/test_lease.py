"""Calls that their caller walks away from: no byte lands late, and nothing stale is committed."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from hicache_tier.geometry import KVGeometry
from hicache_tier.testing.array_pool import (
    ArrayPool,
    blank_pages,
    fill_pages,
    keys_of,
    pages_equal,
    read_page,
    write_page,
)
from hicache_tier.testing.faults import FaultyEngine, Hang
from hicache_tier_storage import open_store, posix_landing
from hicache_tier_storage.lease import Lease
from hicache_tier_storage.posix import PosixEngine
from hicache_tier_storage.probe import probe_posix

GEOMETRY = KVGeometry.mha(num_layers=3, num_kv_heads=2, head_dim=40, dtype="float16", page_tokens=4)
NBYTES = GEOMETRY.page_nbytes
BLANK = b"\xa5" * NBYTES


def held(inner, moment="before", *, lands=False):
    """Return an engine whose calls can be held before or after the bytes move, and what holds them.

    `lands` as `posix`: it reads to memory of its own.
    """
    hang = Hang(after=moment == "after")
    hang.on = False
    engine = FaultyEngine(inner, hang)
    engine.lands = lands
    return engine, hang


class View:
    """A pool under a lease."""

    def __init__(self, pool):
        self.pool = pool
        self.lease = Lease()
        self.geometry, self.layout = pool.geometry, pool.layout
        self.segment_table, self.in_use = pool.segment_table, pool.in_use


@pytest.fixture(params=["layer_first", "page_first"])
def pool(request):
    return ArrayPool(GEOMETRY, request.param, 64, shift=24)


def posix(tmp_path, mode, threads=2):
    if mode == "direct":
        row = next(row for row in probe_posix(tmp_path) if row.mode == "direct")
        if not row.usable:
            pytest.skip(f"O_DIRECT does not work here: {row.reason}")
    return PosixEngine(direct=mode == "direct", threads=threads)


def opened(tmp_path, pool, engine):
    return open_store(tmp_path / "root", GEOMETRY, pool.layout, capacity_bytes="64 MiB", engine=engine)


def in_thread(call):
    answer = []
    thread = threading.Thread(target=lambda: answer.append(call()))
    thread.start()
    return thread, answer


@pytest.mark.parametrize("mode", ["buffered", "direct"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_leased_get_brings_the_bytes_that_a_plain_one_brings(tmp_path, pool, mode, wrapped):
    engine = posix(tmp_path, mode)
    store = opened(tmp_path, pool, held(engine)[0] if wrapped else engine)
    keys, pages = keys_of("k", 40), list(np.random.default_rng(1).permutation(64)[:40])
    fill_pages(pool, pages, keys, NBYTES)
    assert all(store.put(keys, View(pool), pages))
    other = list(reversed(pages))
    for verify in range(2):
        blank_pages(pool, range(64), NBYTES)
        outside = set(range(64)) - set(other)
        assert all(store.get(keys, View(pool), other)), verify
        assert all(pages_equal(pool, other, keys, NBYTES))
        assert all(read_page(pool, page) == BLANK for page in outside)
    store.close()
    engine.close()


@pytest.mark.parametrize("mode", ["buffered", "direct"])
@pytest.mark.parametrize("verb", ["memfd_create", "ftruncate"])
def test_a_leased_get_without_a_file_over_memory(tmp_path, pool, mode, verb, monkeypatch, caplog):
    """As with too many open files: the pages come all the same, and one line tells of it."""
    engine = posix(tmp_path, mode, threads=1)
    store = opened(tmp_path, pool, engine)
    keys, pages = keys_of("k", 64), list(np.random.default_rng(1).permutation(64))
    fill_pages(pool, pages, keys, NBYTES)
    assert all(store.put(keys, View(pool), pages))
    monkeypatch.setattr(posix_landing, "_PREADV2", None)  # nothing is read in place
    monkeypatch.setattr(posix_landing.os, verb, no_more_files)
    posix_landing._tell.cache_clear()
    for count in (1, 20, 64):  # each needs more memory than the one before
        blank_pages(pool, range(64), NBYTES)
        assert all(store.get(keys[:count], View(pool), pages[:count]))
        assert all(pages_equal(pool, pages[:count], keys[:count], NBYTES))
        assert all(read_page(pool, page) == BLANK for page in pages[count:])
    assert [record.message for record in caplog.records] == [
        "no file over memory can be had (Too many open files): reads are copied piece by piece."
    ]
    assert not files_over_memory()
    store.close()
    engine.close()


def files_over_memory():
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return [name for name in found if "hct-landing" in name]


def no_more_files(*_):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_get_that_was_left_writes_nothing_and_loses_nothing(tmp_path, pool, lands, moment):
    engine, hang = held(posix(tmp_path, "buffered"), moment, lands=lands)
    store = opened(tmp_path, pool, engine)
    keys, pages = keys_of("k", 8), list(range(8))
    fill_pages(pool, pages, keys, NBYTES)
    assert all(store.put(keys, pool, pages))
    blank_pages(pool, pages, NBYTES)
    view = View(pool)
    hang.on = True
    thread, answer = in_thread(lambda: store.get(keys, view, pages))
    hang.gate.wait_for()
    if lands and moment == "after":  # it delivers while the lease lasts
        assert all(pages_equal(pool, pages, keys, NBYTES))
    view.lease.end()
    blank_pages(pool, pages, NBYTES)
    hang.gate.open()
    thread.join(20)
    if not (lands and moment == "after"):
        assert [status.reason for status in answer[0]] == ["abandoned"] * 8
    assert all(read_page(pool, page) == BLANK for page in pages)
    assert all(store.get(keys, View(pool), pages))  # and they are still there
    assert all(pages_equal(pool, pages, keys, NBYTES))
    store.close()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_put_that_was_left_commits_nothing(tmp_path, pool, moment):
    engine, hang = held(posix(tmp_path, "buffered"), moment)
    store = opened(tmp_path, pool, engine)
    keys, pages = keys_of("k", 8), list(range(8))
    fill_pages(pool, pages, keys, NBYTES)
    view = View(pool)
    hang.on = True
    thread, answer = in_thread(lambda: store.put(keys, view, pages))
    hang.gate.wait_for()
    view.lease.end()
    for page in pages:
        write_page(pool, page, BLANK)  # as an engine reuses its pages
    hang.gate.open()
    thread.join(20)
    assert [status.reason for status in answer[0]] == ["abandoned"] * 8
    assert store.match_prefix(keys) == 0
    assert not any(store.get(keys, View(pool), pages))
    fill_pages(pool, pages, keys, NBYTES)
    assert all(store.put(keys, View(pool), pages))  # nothing of the first one is in the way
    blank_pages(pool, pages, NBYTES)
    assert all(store.get(keys, View(pool), pages))
    assert all(pages_equal(pool, pages, keys, NBYTES))
    store.close()


def test_a_put_under_a_lease_that_is_over_moves_nothing(tmp_path, pool):
    engine, _ = held(posix(tmp_path, "buffered"))
    store = opened(tmp_path, pool, engine)
    view = View(pool)
    view.lease.end()
    assert [s.reason for s in store.put(keys_of("k", 2), view, [0, 1])] == ["abandoned"] * 2
    assert not engine.calls
    store.close()


def test_the_end_of_a_lease_waits_for_a_copy():
    lease = Lease()
    assert lease.enter()
    thread, ended = in_thread(lease.end)
    thread.join(0.2)
    assert not ended
    assert lease.ended
    assert not lease.enter()
    lease.leave()
    thread.join(10)
    assert ended == [None]


@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_a_damaged_page_is_told_apart_under_a_lease(tmp_path, pool, mode):
    engine = posix(tmp_path, mode)
    store = opened(tmp_path, pool, engine)
    keys, pages = keys_of("k", 6), list(range(6))
    fill_pages(pool, pages, keys, NBYTES)
    assert all(store.put(keys, pool, pages))
    slab = next((tmp_path / "root").rglob("pages/c.0*"))
    store.close()
    with slab.open("r+b") as file:
        at = file.read().find(read_page(pool, 3)[:64])
        file.seek(at + 5)
        file.write(b"?")
    reader = open_store(tmp_path / "root", GEOMETRY, pool.layout, engine=engine, read_only=True)
    blank_pages(pool, pages, NBYTES)
    reasons = [status.reason for status in reader.get(keys, View(pool), pages)]
    assert reasons == ["loaded"] * 3 + ["checksum"] + ["loaded"] * 2
    reader.close()
    engine.close()
