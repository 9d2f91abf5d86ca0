"""Keys of encrypted stores: where they come from, and what a wrong one does."""

from __future__ import annotations

import json
import logging
import pickle
import shutil

import pytest

from hicache_tier.errors import EncryptionError, InvalidArgumentError, StoreError
from hicache_tier.testing.store_rig import (
    GEOMETRY,
    tree,
)
from hicache_tier_storage import EncryptionKey, open_store
from hicache_tier_storage.archive import export_archive
from hicache_tier_storage.inspection import verify_root

KEY, OTHER = EncryptionKey(bytes(range(32))), EncryptionKey(bytes(range(1, 33)))


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


@pytest.mark.parametrize("damage", ["\u00e9", "\ud800"])
def test_a_check_of_strange_letters_is_that_of_another_key(stored, keys, tmp_path, damage):
    partition, space = stored.paths.root / "zarr.json", stored.paths.root.parents[1] / "zarr.json"

    def write(path):
        old = path.read_text()
        document = json.loads(old)
        document["attributes"]["hicache_tier"]["encryption"]["key_check"] = damage * 32
        path.write_text(json.dumps(document))
        return old

    old = write(partition)
    with pytest.raises(EncryptionError, match="another key"):
        stored.open(encryption=KEY)
    for call in (
        lambda: verify_root(stored.root, encryption=KEY),
        lambda: export_archive(stored.root, tmp_path / "archive", encryption=KEY),
    ):
        with pytest.raises(EncryptionError, match="another key"):
            call()
    reader = stored.open(encryption=KEY, read_only=True)
    assert reader.match_prefix(keys) == 0, "it goes on with what others have written"
    partition.write_text(old)
    write(space)
    for read_only in (False, True):
        with pytest.raises(EncryptionError, match="another key"):
            stored.open(encryption=KEY, read_only=read_only)


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
