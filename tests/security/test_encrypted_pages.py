"""Encrypted pages: what lies on disk tells nothing, nobody without the key changes what is served."""

from __future__ import annotations

import os
import time
import zlib

import numpy as np
import pytest

from hicache_tier.geometry import KVGeometry
from hicache_tier.testing.array_pool import ArrayPool, fill_pages, pages_equal
from hicache_tier.testing.store_rig import (
    GEOMETRY,
    PAGE_NBYTES,
    slab_of,
    slot_of,
)
from hicache_tier_storage import EncryptionKey, open_store
from hicache_tier_storage.inspection import verify_root
from hicache_tier_storage.record import RECORD_DTYPE, as_sealed, seal

KEY = EncryptionKey(bytes(range(32)))


def seen(store, keys):
    """Wait until a store has heard of other writers' pages."""
    until = time.monotonic() + 10
    while store.match_prefix(keys) < len(keys) and time.monotonic() < until:
        time.sleep(0.01)
    return store.match_prefix(keys) == len(keys)


def test_pages_come_back_over_restarts_readers_and_other_writers(stored, keys):
    first = stored.open(encryption=KEY)
    second = stored.open(encryption=KEY)
    assert set(stored.put(second, keys[40:])) == {"stored"}
    assert seen(first, keys)
    assert set(stored.get(first, keys)) == {"loaded"}
    assert set(stored.get(stored.open(encryption=KEY, read_only=True), keys)) == {"loaded"}
    assert first.stats()["damage"] == []


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize(
    "geometry",
    [
        GEOMETRY,
        KVGeometry.mha(
            num_layers=3, num_kv_heads=2, head_dim=24, v_head_dim=16, dtype="float8_e4m3fn", page_tokens=4
        ),
        KVGeometry.mha(num_layers=2, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=512),
    ],
    ids=["small", "gap", "4MiB"],
)
def test_every_layout_and_size_of_page(tmp_path, keys, geometry, layout):
    nbytes, count = geometry.page_nbytes, 9
    host = ArrayPool(geometry, layout, 2 * count)
    fill_pages(host, range(count), keys[:count], nbytes)
    options = {"capacity_bytes": 64 * nbytes + (1 << 20), "threads": 2, "encryption": KEY}
    with open_store(tmp_path / "root", geometry, layout, **options) as store:
        assert all(store.put(keys[:count], host, range(count)))
        assert all(store.get(keys[:count], host, range(count, 2 * count)))
        assert all(pages_equal(host, range(count, 2 * count), keys[:count], nbytes))
        assert verify_root(tmp_path / "root", encryption=KEY)["damaged"] == 0


def test_the_disk_holds_no_plain_text_and_no_key(stored, keys, plain_page):
    pages = [plain_page(key) for key in keys[:40]]
    assert all(len(zlib.compress(page)) > 100 for page in pages)
    for path in stored.root.rglob("*"):
        if path.is_file():
            raw = path.read_bytes()
            assert not any(page[at : at + 16] in raw for page in pages for at in (0, 4096, 8000)), path
            assert KEY.secret not in raw
            assert KEY.secret.hex().encode() not in raw


def test_a_zero_page_is_a_page_and_looks_like_any_other(shop, keys):
    host = ArrayPool(GEOMETRY, "page_first", 2)
    store = shop.open(encryption=KEY)
    assert all(store.put(keys[:2], host, range(2)))
    raw = slab_of(store).read_bytes()
    first, second = raw[:PAGE_NBYTES], raw[PAGE_NBYTES : 2 * PAGE_NBYTES]
    assert first != second
    assert len({*first}) == 256
    assert all(store.get(keys[:2], host, range(2)))


@pytest.mark.parametrize(
    "what", ["payload", "tag", "salt", "key", "slot", "sequence", "generation", "created"]
)
def test_whoever_changes_a_byte_without_the_key_gets_a_miss(stored, keys, what):
    """Records are rewritten with a good CRC: only authentication is in the way."""
    store = stored.open(encryption=KEY)
    (slab, slot), (_, other) = slot_of(store, keys[3]), slot_of(store, keys[4])
    store.close()
    table = stored.paths.table(slab)
    records = np.fromfile(table, RECORD_DTYPE)
    sealed = as_sealed(records)
    if what == "payload":
        with stored.slab.open("r+b") as file:
            file.seek(slot * PAGE_NBYTES + 5000)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    elif what == "slot":  # page and record moved together to another slot
        raw = bytearray(stored.slab.read_bytes())
        raw[other * PAGE_NBYTES : (other + 1) * PAGE_NBYTES] = raw[
            slot * PAGE_NBYTES : (slot + 1) * PAGE_NBYTES
        ]
        stored.slab.write_bytes(raw)
        records[other] = records[slot]
        records["sequence"][slot] = 0
        records["state"][slot] = 0
    elif what == "key":
        records["key"][slot] = np.frombuffer(keys[50], np.uint8)
    else:
        column, field = {
            "tag": (sealed, "tag"),
            "salt": (sealed, "salt"),
            "generation": (sealed, "sealed_generation"),
            "sequence": (records, "sequence"),
            "created": (records, "created_ns"),
        }[what]
        column[field][slot] += 1
    seal(records)
    records.tofile(table)
    asked = keys[50] if what == "key" else keys[3]
    reader = stored.open(encryption=KEY, read_only=True)
    assert stored.get(reader, [asked]) == ["checksum"]
    found = verify_root(stored.root, encryption=KEY)
    assert found["damaged"] == 1
    assert "not authentic" in found["details"][0]["what"]
    writer = stored.open(encryption=KEY)
    assert stored.get(writer, [asked]) == ["checksum"]
    assert stored.put(writer, [keys[3]]) == ["stored"]
    assert stored.get(writer, keys[3:4]) == ["loaded"]


@pytest.mark.parametrize("algorithm", [0, 2])
def test_a_page_in_clear_that_somebody_plants_is_none(stored, keys, algorithm):
    import xxhash

    from hicache_tier_storage.record import checksum_seed

    planted = b"p" * PAGE_NBYTES
    with stored.slab.open("r+b") as file:
        file.write(planted)
    table = stored.paths.table(0)
    records = np.fromfile(table, RECORD_DTYPE)
    records["algorithm"][0] = algorithm
    records["checksum"][0] = xxhash.xxh3_64_intdigest(planted, checksum_seed(keys[0]))
    records["reserved"][0] = 0
    seal(records)
    records.tofile(table)
    reader = stored.open(encryption=KEY, read_only=True)
    assert stored.get(reader, keys[:1]) == ["absent"]
    assert verify_root(stored.root, encryption=KEY)["damaged"] == 1
    assert stored.get(stored.open(encryption=KEY), keys[:1]) == ["absent"]


def test_one_key_twice_in_a_call_misses_twice(stored, keys):
    with stored.slab.open("r+b") as file:
        file.write(b"x" * PAGE_NBYTES)
    reader = stored.open(encryption=KEY, read_only=True)
    assert stored.get(reader, [keys[0], keys[1], keys[0]]) == ["checksum", "loaded", "checksum"]
