"""Encryption at rest: what lies on disk tells nothing, nobody without the key changes what is served."""

from __future__ import annotations

import ctypes
import hmac
import json
import logging
import os
import pickle
import shutil
import struct
import threading
import time
import zlib

import google_crc32c
import numpy as np
import pytest
import zarr
from click.testing import CliRunner

from hicache_tier.cli import main
from hicache_tier.errors import EncryptionError, InvalidArgumentError, StoreError
from hicache_tier.geometry import KVGeometry
from hicache_tier.testing.array_pool import ArrayPool, fill_pages, keys_of, pages_equal
from hicache_tier.testing.store_rig import (
    GEOMETRY,
    PAGE_NBYTES,
    StoreRig,
    paths_of,
    slab_of,
    slot_of,
    tree,
    writer_of,
)
from hicache_tier_storage import EncryptionKey, open_store
from hicache_tier_storage.encryption import expand
from hicache_tier_storage.inspection import inspect_root, verify_root
from hicache_tier_storage.page_cipher import PageCipher
from hicache_tier_storage.record import RECORD_DTYPE, as_records, as_sealed, seal

KEY, OTHER = EncryptionKey(bytes(range(32))), EncryptionKey(bytes(range(1, 33)))


@pytest.fixture
def stored(shop, keys):
    """A closed encrypted store of 40 pages."""
    store = shop.open(encryption=KEY)
    assert set(shop.put(store, keys[:40])) == {"stored"}
    assert set(shop.get(store, keys[:40])) == {"loaded"}
    shop.paths, shop.slab = paths_of(store), slab_of(store)
    store.close()
    return shop


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


def plain_page(key):
    """Bytes of the page of a key."""
    host = ArrayPool(GEOMETRY, "page_first", 1)
    fill_pages(host, [0], [key], PAGE_NBYTES)
    addresses, lengths = host.segment_table([0])
    parts = zip(addresses[0].tolist(), lengths.tolist(), strict=True)
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in parts)


def seen(store, keys):
    """Wait until a store has heard of other writers' pages."""
    until = time.monotonic() + 10
    while store.match_prefix(keys) < len(keys) and time.monotonic() < until:
        time.sleep(0.01)
    return store.match_prefix(keys) == len(keys)


# -- pages come back, and only they -----------------------------------------------------------------------


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


def test_the_disk_holds_no_plain_text_and_no_key(stored, keys):
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


# -- keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("key", [None, OTHER])
def test_a_missing_or_wrong_key_is_an_error_and_changes_nothing(stored, keys, key, read_only):
    before = tree(stored.root)
    with pytest.raises(EncryptionError, match="encrypted") as raised:
        stored.open(encryption=key, read_only=read_only)
    assert raised.value.kind == "encryption"
    assert isinstance(raised.value, StoreError)
    assert tree(stored.root) == before
    assert set(stored.get(stored.open(encryption=KEY), keys[:40])) == {"loaded"}


def test_one_root_of_several_with_another_key_is_an_error_not_left_out(shop, keys, tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    options = {"capacity_bytes": 4 << 20, "io_mode": "buffered"}
    with open_store(roots, GEOMETRY, "page_first", encryption=KEY, **options) as store:
        assert set(shop.put(store, keys)) == {"stored"}
        assert set(shop.get(store, keys)) == {"loaded"}
        assert store.stats()["encryption"] == "aes-256-gcm"
    shutil.rmtree(roots[0])
    for key in (OTHER, None):
        with pytest.raises(EncryptionError):
            open_store(roots, GEOMETRY, "page_first", encryption=key, **options)
    assert shop.open().stats()["encryption"] is None


def test_a_wrong_key_is_told_by_a_partition_where_the_namespaces_document_is_damaged(stored, keys):
    group = stored.paths.root.parents[1] / "zarr.json"
    group.write_text("{")
    with pytest.raises(EncryptionError, match="another key"):
        stored.open(encryption=OTHER)
    assert group.read_text() == "{"
    assert stored.open(encryption=KEY).match_prefix(keys) == 40
    with pytest.raises(EncryptionError):
        stored.open(encryption=OTHER)


def test_pages_in_clear_are_not_taken_for_encrypted_ones(shop, keys, caplog):
    plain = shop.open()
    shop.put(plain, keys[:4])
    plain.close()
    before = tree(shop.root)
    store = shop.open(encryption=KEY)
    assert store.match_prefix(keys) == 0
    assert "not encrypted; they are not used" in caplog.text
    store.close()
    after = tree(shop.root)
    assert all(after[name] == before[name] for name in before if name.endswith((".0", "zarr.json")))
    with pytest.raises(EncryptionError):
        shop.open()


def test_keys_from_files_and_environment(tmp_path, monkeypatch, caplog):
    text, raw = tmp_path / "key.txt", tmp_path / "key.bin"
    text.write_text(KEY.secret.hex() + "\n")
    raw.write_bytes(KEY.secret)
    for path in (text, raw):
        path.chmod(0o600)
    monkeypatch.setenv("THE_KEY", KEY.secret.hex().upper())
    for value in (str(text), raw, "env:THE_KEY", KEY):
        assert EncryptionKey.parse(value) == KEY
    assert EncryptionKey.parse(None) is None
    assert not caplog.text
    text.chmod(0o644)
    EncryptionKey.parse(text)
    assert "every user of this host" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no key"),
        (b"ab" * 31, "holds no key"),
        (b"g" * 64, "holds no key"),
        (b"\xff" * 9000, "no key"),
    ],
)
def test_what_is_no_key_is_refused_and_not_shown(shop, tmp_path, content, message):
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InvalidArgumentError, match=message) as raised:
        shop.open(encryption=path)
    assert "gggg" not in str(raised.value)
    assert "abab" not in str(raised.value)
    assert not shop.root.exists()


@pytest.mark.parametrize("value", ["env:NOT_SET_AT_ALL", "/nowhere/key", 7, b"k" * 32])
def test_a_key_that_is_not_to_be_had_is_an_error(shop, value):
    with pytest.raises(InvalidArgumentError, match="key"):
        shop.open(encryption=value)
    with pytest.raises(InvalidArgumentError):
        EncryptionKey(b"short")


def test_a_key_shows_nowhere(stored, caplog):
    caplog.set_level(logging.DEBUG)
    store = stored.open(encryption=KEY)
    for text in (repr(KEY), str(KEY), repr(store), repr(store.identity), repr(store.stats()), caplog.text):
        assert KEY.secret.hex() not in text
        assert repr(KEY.secret) not in text
    assert pickle.loads(pickle.dumps(KEY)) == KEY  # workers of an export get it so


# -- nonces -----------------------------------------------------------------------------------------------


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
        writer._used[slots] += 1000
        writer._republish(slots)
    after = as_records(writer.tables.gather(slots))
    assert PageCipher.contexts(after, slots) == before
    assert (after["flags"] == 1).all()
    assert (after["generation"] > as_sealed(after)["sealed_generation"]).all()
    assert set(stored.get(store, keys[:8])) == {"loaded"}
    assert set(stored.get(stored.open(encryption=KEY, read_only=True), keys[:8])) == {"loaded"}


def test_a_page_decrypts_by_the_format_document_alone(stored, keys):
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


# -- everything else that a store does --------------------------------------------------------------------


def test_a_slab_is_given_up_and_its_pages_move_encrypted_anew(shop, keys):
    store = shop.open(encryption=KEY)
    shop.put(store, keys[:40], pin=True)
    writer = writer_of(store)
    store.delete(keys[:20])
    slabs = len(writer.slabs)
    with store._core.lock:
        assert store._core.shed()
    assert len(writer.slabs) == slabs - 1
    assert set(shop.get(store, keys[20:40])) == {"loaded"}
    store.close()
    assert verify_root(shop.root, encryption=KEY)["damaged"] == 0
    assert set(shop.get(shop.open(encryption=KEY), keys[20:40])) == {"loaded"}


def test_a_record_torn_by_a_kill_is_mended_only_where_its_page_is_authentic(stored, keys):
    words = np.fromfile(stored.paths.table(0), np.uint64).reshape(-1, 16)
    words[:2, 1] += 1  # odd: being published anew
    words.tofile(stored.paths.table(0))
    with stored.slab.open("r+b") as file:
        file.write(b"another page")
    store = stored.open(encryption=KEY)
    assert stored.get(store, keys[:2]) == ["absent", "loaded"]


def test_after_power_loss_pages_are_kept_and_authenticated(stored, keys):
    state = bytearray(stored.paths.state.read_bytes())
    state[32:48], state[56] = bytes(16), 0
    state[12:16] = google_crc32c.value(bytes(state[16:512])).to_bytes(4, "little")
    stored.paths.state.write_bytes(state)
    with stored.slab.open("r+b") as file:
        file.write(b"garbage")
    store = stored.open(encryption=KEY, checksums=False)
    assert store.match_prefix(keys) == 40
    assert stored.get(store, keys[:3]) == ["checksum", "loaded", "loaded"]


def test_threads_put_and_get_at_once(shop):
    store = shop.open(encryption=KEY)
    wrong = []

    def work(number):
        mine = keys_of(f"thread{number}", 24)
        for _ in range(6):
            shop_of = StoreRig(shop.root)
            assert set(shop_of.put(store, mine)) <= {"stored", "already_stored"}
            if set(shop_of.get(store, mine)) - {"loaded"}:
                wrong.append(number)
            store.delete(mine[:12])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_zarr_reads_is_ciphertext_and_says_so(stored):
    array = zarr.open_array(str(stored.paths.pages), mode="r")
    assert array.dtype == np.uint8
    assert array.shape[1:] == (PAGE_NBYTES,)
    assert array.attrs["hicache_tier"]["encryption"] == "aes-256-gcm"
    assert array.metadata.dimension_names == ("slot", "byte")
    from hicache_tier_storage.dataset import open_dataset

    with pytest.raises(EncryptionError, match="encrypted"):
        open_dataset(stored.root)


def test_a_store_without_a_key_is_of_version_1_to_the_byte(shop, keys):
    store = shop.open()
    shop.put(store, keys[:3])
    store.close()
    for path in shop.root.rglob("zarr.json"):
        attributes = json.loads(path.read_bytes())["attributes"].get("hicache_tier", {})
        assert attributes.get("version", 1) == 1
        assert "encryption" not in attributes


def test_inspect_and_verify_with_and_without_the_key(stored):
    (space,) = inspect_root(stored.root)["namespaces"]
    assert space["identity"]["encryption"]["algorithm"] == "aes-256-gcm"
    (partition,) = space["partitions"]
    assert (partition["encryption"], partition["pages"], partition["damage"]) == ("aes-256-gcm", 40, [])
    blind, seeing = verify_root(stored.root), verify_root(stored.root, encryption=KEY)
    assert (blind["damaged"], blind["unverifiable"]) == (0, 40)
    assert (seeing["damaged"], seeing["unverifiable"], seeing["pages"]) == (0, 0, 40)
    with pytest.raises(EncryptionError, match="another key"):
        verify_root(stored.root, encryption=OTHER)


def test_export_and_import_by_the_command_line(stored, keys, tmp_path):
    key_file, other_file = tmp_path / "key", tmp_path / "other"
    for path, key in ((key_file, KEY), (other_file, OTHER)):
        path.write_text(key.secret.hex())
        path.chmod(0o600)
    archive, runner = tmp_path / "archive", CliRunner()

    def run(*command, key=None):
        option = [] if key is None else ["--key-file", str(key)]
        result = runner.invoke(main, [*map(str, command), *option, "--json"])
        return result.exit_code, json.loads(result.stdout)

    for key in (None, other_file):
        code, said = run("export", stored.root, archive, key=key)
        assert (code, said["error"]["kind"]) == (2, "encryption")
    assert not archive.exists()
    code, said = run("export", stored.root, archive, key=key_file)
    assert (code, said["pages"]) == (0, 40)
    for key, root in ((None, tmp_path / "plain"), (other_file, tmp_path / "again")):
        code, said = run("import", archive, root, "--capacity", "2MiB", key=key)
        assert (code, said["imported"], said["refused"]) == (0, 40, {})
        copy = StoreRig(root)
        store = copy.open(encryption=key)
        assert set(copy.get(store, keys[:40])) == {"loaded"}
        copy.close()
        assert run("verify", root, key=key)[1]["unverifiable"] == 0
    assert run("verify", stored.root, key=other_file)[1]["error"]["kind"] == "encryption"


def test_without_the_package_the_error_names_the_extra(shop, monkeypatch):
    import builtins

    real = builtins.__import__

    def missing(name, *arguments, **options):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(EncryptionError, match=r"hicache-tier\[encryption\]"):
        shop.open(encryption=KEY)


def test_the_benchmark_tells_what_encryption_costs(tmp_path):
    options = ["--case", "8x64KiB", "--mode", "buffered", "--peer", "none", "--slots", "0", "--repeats", "3"]
    command = ["bench", "storage", "--root", str(tmp_path), *options, "--allow-cached", "--encryption"]
    result = CliRunner().invoke(main, [*command, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    encrypted = [row for row in rows if row["encrypted"]]
    assert {row["direction"] for row in encrypted} == {"put", "get"}
    assert all(row["checksums"] and 0 < row["ratio_to_plain"] < 100 for row in encrypted)
    assert all(row["ratio_to_plain"] is None for row in rows if not row["encrypted"])
    assert not list(tmp_path.iterdir())
