from __future__ import annotations

import ctypes

import pytest

from hicache_tier.testing.array_pool import ArrayPool, fill_pages, keys_of
from hicache_tier.testing.store_rig import GEOMETRY, PAGE_NBYTES, StoreRig, paths_of, slab_of
from hicache_tier_storage import EncryptionKey


@pytest.fixture
def shop(tmp_path):
    shop = StoreRig(tmp_path / "root")
    yield shop
    shop.close()


@pytest.fixture
def keys():
    return keys_of("security", 64)


@pytest.fixture
def stored(shop, keys):
    """A closed encrypted store of 40 pages."""
    store = shop.open(encryption=EncryptionKey(bytes(range(32))))
    assert set(shop.put(store, keys[:40])) == {"stored"}
    assert set(shop.get(store, keys[:40])) == {"loaded"}
    shop.paths, shop.slab = paths_of(store), slab_of(store)
    store.close()
    return shop


@pytest.fixture
def plain_page():
    """Return what gives the bytes of the page of a key."""

    def made(key):
        host = ArrayPool(GEOMETRY, "page_first", 1)
        fill_pages(host, [0], [key], PAGE_NBYTES)
        addresses, lengths = host.segment_table([0])
        parts = zip(addresses[0].tolist(), lengths.tolist(), strict=True)
        return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in parts)

    return made
