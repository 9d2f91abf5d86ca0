"""Nonces of encrypted pages: none is used twice, and records are bound to their pages."""

from __future__ import annotations

import hmac
import json
import shutil
import struct

import google_crc32c
import numpy as np
import pytest

from hicache_tier.testing.store_rig import (
    PAGE_NBYTES,
    StoreRig,
    writer_of,
)
from hicache_tier_storage import EncryptionKey
from hicache_tier_storage.encryption import expand
from hicache_tier_storage.page_cipher import PageCipher
from hicache_tier_storage.record import as_records, as_sealed

KEY = EncryptionKey(bytes(range(32)))


@pytest.fixture
def derived(monkeypatch):
    """Every (key, nonce) that a page was encrypted with."""
    seen = []
    real = PageCipher._begin

    def begin(cipher, context, tag):
        if tag is None:
            seen.append(expand(cipher._key, b"hct-page-1" + context, 44))
        return real(cipher, context, tag)

    monkeypatch.setattr(PageCipher, "_begin", begin)
    return seen


def test_no_nonce_is_used_twice(shop, keys, derived):
    """Slots given out again, slabs made anew, restarts, copies of the root, two writers."""
    store = shop.open(encryption=KEY)
    for _ in range(3):
        shop.put(store, keys[:20])
        store.delete(keys[:20])
    store.close()
    copy = shop.root.with_name("copy")
    shutil.copytree(shop.root, copy)
    for root in (shop.root, copy):
        rig = StoreRig(root)
        first, second = rig.open(encryption=KEY), rig.open(encryption=KEY)
        rig.put(first, keys[:40])
        rig.put(second, keys[40:])
        with first._core.lock:
            first._core.shed()
        first.clear()
        rig.put(first, keys[:30])
        rig.close()
    assert len(derived) >= 3 * 20 + 2 * (64 + 30)
    assert len({*derived}) == len(derived)


def test_a_power_loss_that_takes_generations_and_sequences_back_repeats_no_nonce(
    shop, keys, derived, monkeypatch
):
    """The disk remembers what is as old as can be, the clock stands still, and the process is gone."""
    monkeypatch.setattr("time.time_ns", lambda: 1_700_000_000_000_000_000)
    shop.open(encryption=KEY).close()
    store = shop.open(encryption=KEY)
    shop.put(store, keys[:1])
    store.delete(keys[:1])
    store.close()
    snapshot = shop.root.with_name("snapshot")
    shutil.copytree(shop.root, snapshot)
    for _ in range(6):
        shutil.rmtree(shop.root)
        shutil.copytree(snapshot, shop.root)
        store = shop.open(encryption=KEY)
        assert shop.put(store, keys[:4]) == ["stored"] * 4
        store.close()
    assert len({*derived}) == len(derived) == 25


def test_what_a_record_says_of_its_page_for_good_is_bound_and_what_changes_is_not(stored, keys):
    store = stored.open(encryption=KEY)
    writer = writer_of(store)
    slots = np.array([store._core.index[key] for key in keys[:8]], np.int64)
    before = PageCipher.contexts(as_records(writer.tables.gather(slots)), slots)
    store.pin(keys[:8])
    with store._core.lock:
        writer._times.used[slots] += 1000
        writer._republish(slots)
    after = as_records(writer.tables.gather(slots))
    assert PageCipher.contexts(after, slots) == before
    assert (after["flags"] == 1).all()
    assert (after["generation"] > as_sealed(after)["sealed_generation"]).all()
    assert set(stored.get(store, keys[:8])) == {"loaded"}
    assert set(stored.get(stored.open(encryption=KEY, read_only=True), keys[:8])) == {"loaded"}


def test_a_page_decrypts_by_the_format_document_alone(stored, keys, plain_page):
    """Written from FORMAT.md, section 8, with the standard library and one call of AES-GCM."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    def hkdf_expand(key, info, nbytes):
        blocks, block = b"", b""
        for number in range(1, -(-nbytes // 32) + 1):
            block = hmac.digest(key, block + info + bytes([number]), "sha256")
            blocks += block
        return blocks[:nbytes]

    place = "/".join(stored.paths.root.parts[-3:]).encode()
    partition_key = hkdf_expand(bytes(range(32)), b"hct-partition-1" + place, 32)
    record = stored.paths.table(0).read_bytes()[2 * 128 : 3 * 128]
    assert record[6] == 3
    context = struct.pack("<Q", 2) + record[7:8] + record[16:92] + record[120:128]
    material = hkdf_expand(partition_key, b"hct-page-1" + context, 44)
    payload = stored.slab.read_bytes()[2 * PAGE_NBYTES : 3 * PAGE_NBYTES]
    page = AESGCM(material[:32]).decrypt(material[32:], payload + record[104:120], place + b"\0" + context)
    key = record[16 : 16 + record[7]]
    assert page == plain_page(key)
    group = json.loads((stored.paths.root / "zarr.json").read_bytes())["attributes"]["hicache_tier"]
    assert group["version"] == 2
    namespace = stored.paths.root.parts[-3]
    check = hkdf_expand(bytes(range(32)), b"hct-key-check-1" + namespace.encode(), 16).hex()
    assert group["encryption"] == {"algorithm": "aes-256-gcm", "key_check": check}
    assert int.from_bytes(record[:4], "little") == google_crc32c.value(record[4:])
