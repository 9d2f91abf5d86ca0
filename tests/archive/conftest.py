"""Small stores, and words for what tests of archives do with them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from hicache_tier.geometry import KVGeometry
from hicache_tier.testing.array_pool import ArrayPool, keys_of, page_bytes, read_page, write_page
from hicache_tier_storage import open_store

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


@pytest.fixture(scope="session")
def shop_class():
    return Shop
