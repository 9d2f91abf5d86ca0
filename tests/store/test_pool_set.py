"""Fault kind 17: side pools that a prefix needs."""

from __future__ import annotations

import pytest

from hicache_tier import HostPool, KVGeometry, open_store
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier_storage import match_pools, usable_prefix

KV = KVGeometry.mla(num_layers=2, latent_dim=64, dtype="bfloat16", page_tokens=16)
INDEXER = KVGeometry.indexer(num_layers=2, bytes_per_token=132, page_tokens=16)
POOLS = {"kv": KV, "indexer": INDEXER}


@pytest.fixture
def stores(tmp_path):
    options = {"layout": "page_first", "model": "m", "capacity_bytes": "4 MiB", "pools": POOLS}
    with (
        open_store(tmp_path, KV, **options) as kv,
        open_store(tmp_path, INDEXER, **options) as indexer,
    ):
        yield kv, indexer


@pytest.fixture
def hosts():
    return HostPool(KV, "page_first", 16), HostPool(INDEXER, "page_first", 16)


def test_pools_of_a_set_are_partitions_beside_each_other(stores, tmp_path):
    kv, indexer = stores
    assert kv.identity.namespace == indexer.identity.namespace
    ranks = list((tmp_path / kv.identity.namespace).glob("*-w0"))
    assert [sorted(entry.name for entry in rank.iterdir()) for rank in ranks] == [
        ["indexer", "kv", "zarr.json"]
    ]


def test_another_set_is_another_namespace(stores, tmp_path):
    kv, _ = stores
    with open_store(tmp_path, KV, "page_first", model="m", capacity_bytes="4 MiB") as alone:
        assert alone.identity.namespace != kv.identity.namespace


def test_usable_prefix_is_the_least_over_the_pools(stores, hosts):
    keys = keys_of("side", 10)
    kv, indexer = stores
    assert match_pools(stores, keys) == 0
    assert all(kv.put(keys, hosts[0], range(10)))
    assert match_pools(stores, keys) == 0
    assert all(indexer.put(keys[:7], hosts[1], range(7)))
    assert match_pools(stores, keys) == 7
    # A side page that goes between the match and the read shortens the prefix at read time.
    assert indexer.delete([keys[4]]) == [True]
    loaded = [store.get(keys[:7], host, range(7)) for store, host in zip(stores, hosts, strict=True)]
    assert usable_prefix(loaded) == 4
    assert match_pools(stores, keys) == 4


def test_a_set_that_leaves_out_its_own_pool_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="this one included"):
        open_store(tmp_path, KV, "page_first", pools={"indexer": INDEXER})
    assert not list(tmp_path.iterdir())


def test_no_pools_no_prefix():
    with pytest.raises(InvalidArgumentError, match="at least one pool"):
        match_pools([], [])
    with pytest.raises(InvalidArgumentError, match="at least one pool"):
        usable_prefix([])
