"""An encrypted store does everything else that a store does."""

from __future__ import annotations

import json
import threading

import google_crc32c
import numpy as np
import pytest
import zarr
from click.testing import CliRunner

from hicache_tier.cli import main
from hicache_tier.errors import EncryptionError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import (
    PAGE_NBYTES,
    StoreRig,
    writer_of,
)
from hicache_tier_storage import EncryptionKey
from hicache_tier_storage.inspection import inspect_root, verify_root

KEY, OTHER = EncryptionKey(bytes(range(32))), EncryptionKey(bytes(range(1, 33)))


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


def test_verify_takes_what_its_key_fits_where_namespaces_have_keys_of_their_own(stored, keys):
    """FORMAT.md, section 8: the key belongs to the namespace."""
    other = stored.open(model="another", encryption=OTHER)
    assert set(stored.put(other, keys[:3])) == {"stored"}
    other.close()
    for key, locked in ((KEY, 3), (OTHER, 40), (None, 43)):
        told = verify_root(stored.root, encryption=key)
        assert (told["pages"], told["damaged"], told["unverifiable"], told["locked"]) == (
            43,
            0,
            locked,
            locked,
        )
    raw = bytearray(stored.slab.read_bytes())
    raw[7] ^= 1
    stored.slab.write_bytes(raw)
    assert [verify_root(stored.root, encryption=key)["damaged"] for key in (KEY, OTHER)] == [1, 0]
    with pytest.raises(EncryptionError, match="another key"):
        verify_root(stored.root, encryption=EncryptionKey(b"3" * 32))


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
    with pytest.raises(EncryptionError, match=r"hicache-tier\[encryption\].*in a clone.*\.\[encryption\]"):
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
