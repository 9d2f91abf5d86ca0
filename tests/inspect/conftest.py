"""A closed store with one chain of pages, and ways to look at its files."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from hicache_tier import KVGeometry, open_store
from hicache_tier.testing.array_pool import ArrayPool, fill_pages, key_of

if TYPE_CHECKING:
    from pathlib import Path

GEOMETRY = KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=8)
STRIDE = GEOMETRY.page_nbytes
SLOTS = 8
CAPACITY = 16 * SLOTS * STRIDE
COUNT = 20


def open_test_store(root, **options):
    options = {"model": "m", "capacity_bytes": CAPACITY, "io_mode": "buffered"} | options
    return open_store(root, GEOMETRY, "page_first", **options)


def put_chain(store, keys, **options):
    host = ArrayPool(GEOMETRY, "page_first", len(keys))
    pages = list(range(len(keys)))
    fill_pages(host, pages, keys, GEOMETRY.page_nbytes)
    return store.put(keys, host, pages, parents=[None, *keys[:-1]], **options)


def until(condition):
    """Wait for what another store must see within 100 ms; generous, for machines that are busy."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@dataclass
class Stored:
    """A closed store of one partition: page n of the chain lies in slot n, 8 slots a slab."""

    root: Path
    keys: list[bytes]

    @property
    def partition(self) -> Path:
        (state,) = (path for path in self.root.glob("*/*-w0/kv/state") if not path.parents[2].is_symlink())
        return state.parent

    def slab(self, number: int) -> Path:
        (path,) = (self.partition / "pages").glob(f"c.{number}.0*")
        return path

    def table(self, number: int) -> Path:
        return self.partition / "slots" / f"c.{number}.0"


def patch(path, at, change):
    """Replace bytes at an offset by `change(old byte)`."""
    raw = bytearray(path.read_bytes())
    raw[at] = change(raw[at])
    path.write_bytes(raw)


def snapshot(root):
    """Everything a write would change: names, kinds, sizes, times of change, contents."""
    found = {}
    for path in [root, *root.rglob("*")]:
        stat = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[path] = (stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, data)
    return found


@pytest.fixture
def stored(tmp_path):
    root = tmp_path / "store"
    keys = [key_of(number) for number in range(COUNT)]
    with open_test_store(root) as store:
        assert all(put_chain(store, keys))
    return Stored(root, keys)


@pytest.fixture
def tools():
    class Tools:
        open_store = staticmethod(open_test_store)
        put_chain = staticmethod(put_chain)
        patch = staticmethod(patch)
        snapshot = staticmethod(snapshot)
        until = staticmethod(until)
        geometry = GEOMETRY
        stride, slots, count, capacity = STRIDE, SLOTS, COUNT, CAPACITY

    return Tools


CHILD = """
import sys
from hicache_tier import KVGeometry
from hicache_tier.testing.array_pool import ArrayPool, fill_pages, keys_of
from hicache_tier_storage import open_store
geometry = KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=8)
host = ArrayPool(geometry, "page_first", 16)
store = open_store(sys.argv[1], geometry, "page_first", model="m", capacity_bytes=int(sys.argv[2]),
                   io_mode="buffered")
pages, first = list(range(16)), 0
while True:
    keys = keys_of("child", 16, first)
    fill_pages(host, pages, keys, geometry.page_nbytes)
    assert all(store.put(keys, host, pages, parents=[None, *keys[:-1]]))
    first += 16
    print(first, flush=True)
"""


@pytest.fixture
def child(tmp_path):
    """Start a process that puts without end, wait for its first puts, and hand it over."""
    started = []

    def start(root):
        command = [sys.executable, "-c", CHILD, str(root), str(CAPACITY)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        for _ in range(4):
            assert process.stdout.readline().strip(), "the writer did not start"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
