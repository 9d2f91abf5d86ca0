"""Every store of a released version opens in this one and serves every page."""

from __future__ import annotations

import hashlib
import json
import struct

import google_crc32c
import pytest

from hicache_tier import HostPool, open_store
from hicache_tier.errors import FormatVersionError
from hicache_tier.testing.array_pool import read_page, write_page
from hicache_tier_storage.dataset import open_dataset
from hicache_tier_storage.inspection import inspect_root, verify_root

SIZE = {"capacity_bytes": "4 MiB"}


@pytest.fixture
def store_of(maker):
    def opened(root, **more):
        golden = maker.GOLDEN[root.name]
        return open_store(root, golden.geometry, golden.layout, **golden.options, **SIZE, **more)

    return opened


@pytest.mark.parametrize("read_only", [False, True], ids=["writer", "read_only"])
@pytest.mark.parametrize("verify", ["suspect", "always"])
def test_every_page_is_served(copy, expected, maker, store_of, read_only, verify):
    golden = maker.GOLDEN[copy.name]
    keys = [bytes.fromhex(key) for key in expected]
    with (
        HostPool(golden.geometry, golden.layout, len(keys)) as host,
        store_of(copy, read_only=read_only, verify=verify) as store,
    ):
        pages = host.alloc(len(keys))
        assert [bool(status) for status in store.get(keys, host, pages)] == [True] * len(keys)
        for page, key in zip(pages.tolist(), keys, strict=True):
            assert hashlib.sha256(read_page(host, page)).hexdigest() == expected[key.hex()]


@pytest.mark.parametrize("read_only", [False, True], ids=["writer", "read_only"])
def test_nothing_else_is_served(copy, expected, maker, store_of, read_only):
    golden = maker.GOLDEN[copy.name]
    others = [key for key in maker.keys_of(copy.name) if maker.stored_key(key).hex() not in expected]
    assert others
    with (
        HostPool(golden.geometry, golden.layout, len(others)) as host,
        store_of(copy, read_only=read_only) as store,
    ):
        assert not any(store.get(others, host, host.alloc(len(others))))


def test_new_pages_join_the_old_ones(copy, expected, maker, reader, store_of):
    golden = maker.GOLDEN[copy.name]
    missing = [key for key in maker.keys_of(copy.name) if maker.stored_key(key).hex() not in expected]
    with HostPool(golden.geometry, golden.layout, len(missing)) as host, store_of(copy) as store:
        pages = host.alloc(len(missing))
        store.get(missing, host, pages)  # drops what is damaged
        for page, key in zip(pages.tolist(), missing, strict=True):
            write_page(host, page, maker.payload(key, golden.geometry.page_nbytes))
        assert all(store.put(missing, host, pages))
        boot = maker.BOOT if golden.unclean else b""
    (found,) = reader.read_store(copy, boot, golden.key)
    assert len(found.pages) == len(expected) + len(missing)


def test_inspect_and_verify_agree(golden, expected, maker):
    told = inspect_root(golden)
    (partition,) = told["namespaces"][0]["partitions"]
    damaged = maker.GOLDEN[golden.name].unclean
    assert told["foreign"] == []
    assert partition["pages"] == len(expected) + damaged
    assert partition["unfinished"] == 1
    assert partition["suspect_pages"] == (partition["pages"] if damaged else 0)
    assert partition["chains"]["longest"] == maker.PAGES - 1
    checked = verify_root(golden, encryption=maker.GOLDEN[golden.name].options.get("encryption"))
    assert checked["damaged"] == damaged
    assert checked["pages"] == partition["pages"]
    assert checked["unverifiable"] == (0 if maker.GOLDEN[golden.name].checksums else checked["pages"])


def raise_version(path):
    data = json.loads(path.read_text())
    data["attributes"]["hicache_tier"]["version"] = 7
    path.write_text(json.dumps(data))


def raise_state_version(path):
    raw = bytearray(path.read_bytes())
    struct.pack_into("<I", raw, 8, 7)
    struct.pack_into("<I", raw, 12, google_crc32c.value(bytes(raw[16:512])))
    path.write_bytes(raw)


@pytest.mark.parametrize("where", ["namespace", "partition", "state"])
def test_a_later_version_is_refused_naming_both(one, maker, store_of, where):
    pattern = {"namespace": "*/zarr.json", "partition": "*/*/kv/zarr.json", "state": "*/*/kv/state/c.0"}
    (path,) = one.glob(pattern[where])
    (raise_state_version if where == "state" else raise_version)(path)
    before = {path: path.read_bytes() for path in one.rglob("*") if path.is_file()}
    calls = [store_of, inspect_root, verify_root]
    if where != "state":  # a data set needs no state block
        calls.append(open_dataset)
    for call in calls:
        with pytest.raises(FormatVersionError, match=r"version 7.* up to (version )?[12]"):
            call(one)
    after = {path: path.read_bytes() for path in one.rglob("*") if path.is_file()}
    assert {path: raw for path, raw in after.items() if "probe" not in path.name} == before
