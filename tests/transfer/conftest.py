from __future__ import annotations

import pytest

from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool


@pytest.fixture
def mha():
    return KVGeometry.mha(num_layers=4, num_kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=4)


@pytest.fixture
def host(mha):
    with HostPool(mha, "page_first", 16, pinned=False) as pool:
        yield pool
