from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import StoreRig


@pytest.fixture
def shop(tmp_path):
    shop = StoreRig(tmp_path / "root")
    yield shop
    shop.close()


@pytest.fixture
def memory_path(tmp_path):
    """A directory in memory, for tests that open many stores; where there is none, one on disk."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="hct-test-", dir=shm) as path:
        yield Path(path)


@pytest.fixture
def keys():
    return keys_of("test", 300)
