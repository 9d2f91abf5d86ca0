"""Small stores, and words for what tests of archives do with them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from hicache_tier.geometry import KVGeometry
from hicache_tier.testing.array_pool import ArrayPool, keys_of, page_bytes, read_page, write_page
from hicache_tier_storage import open_store
from hicache_tier_storage.archive import exporting, open_archive
from hicache_tier_storage.record import keys_of as keys_of_rows

MHA = KVGeometry.mha(num_layers=2, num_kv_heads=4, head_dim=8, dtype="bfloat16", page_tokens=8)
CAPACITY = 4 << 20


class Shop:
    """Makes stores below one folder and reads them back; a page's bytes follow from its key."""

    geometry = MHA

    def __init__(self, folder):
        self.folder = folder

    def fill(
        self, name="store", geometry=MHA, layout="page_first", keys=None, parents=None, data=None, **options
    ):
        """Store the pages of keys as one chain; return root and keys."""
        root = self.folder / name
        keys = keys_of(name, 20) if keys is None else keys
        parents = [None, *keys[:-1]] if parents is None else parents
        options = {"model": "m", "capacity_bytes": CAPACITY, "io_mode": "buffered", "threads": 1} | options
        with open_store(root, geometry, layout, **options) as store:
            host = ArrayPool(geometry, layout, len(keys))
            for at, key in enumerate(keys):
                write_page(host, at, page_bytes(key, geometry.page_nbytes) if data is None else data[key])
            assert all(store.put(keys, host, range(len(keys)), parents=parents))
        return root, keys

    def read(self, root, keys, geometry=MHA, layout="page_first", **options):
        """Return the bytes of pages by key; those that are not there are left out."""
        options = {"model": "m", "capacity_bytes": CAPACITY, "verify": "always", "read_only": True} | options
        with open_store(root, geometry, layout, **options) as store:
            host = ArrayPool(geometry, layout, max(1, len(keys)))
            status = store.get(keys, host, range(len(keys)))
            return {key: read_page(host, at) for at, key in enumerate(keys) if status[at]}

    @staticmethod
    def archived(path):
        """Return part, key and bytes of every page of an archive, each checked."""
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

    def keys_in(self, path):
        return {key for _, key in self.archived(path)}


@pytest.fixture
def tmp_path(tmp_path):
    """A folder in memory where there is one: tests make many small files."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="hct-test-", dir=shm) as path:
        yield Path(path)


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path)


def content(keys, geometry=MHA):
    return {key: page_bytes(key, geometry.page_nbytes) for key in keys}


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(exporting, "shard_pages", lambda _: 4)


@pytest.fixture(scope="session")
def shop_class():
    return Shop
