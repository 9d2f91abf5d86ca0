from __future__ import annotations

import pytest

from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import StoreRig


@pytest.fixture
def shop(tmp_path):
    shop = StoreRig(tmp_path / "root")
    yield shop
    shop.close()


@pytest.fixture
def keys():
    return keys_of("security", 64)
