"""Bad input is one clear error, before anything is touched."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from hicache_tier.errors import (
    FormatVersionError,
    HiCacheTierError,
    InvalidArgumentError,
    NotAStoreError,
    StoreError,
    StoreFullError,
)
from hicache_tier.geometry import KVGeometry
from hicache_tier.testing.array_pool import ArrayPool
from hicache_tier.testing.store_rig import GEOMETRY, PAGE_NBYTES, paths_of, tree
from hicache_tier_storage import open_store
from hicache_tier_storage.identity import FORMAT_VERSION

BAD_OPTIONS = [
    ({"capacity_bytes": 0}, "above 0"),
    ({"capacity_bytes": -1}, "above 0"),
    ({"capacity_bytes": "0"}, "above 0"),
    ({"capacity_bytes": "-5 GiB"}, "capacity_bytes"),
    ({"capacity_bytes": -(10**400)}, "above 0"),
    ({"capacity_bytes": 10**400}, "below 8 EiB"),
    ({"capacity_bytes": "8388608 TiB"}, "below 8 EiB"),
    ({"capacity_bytes": "9" * 5000 + " GiB"}, "100 GiB"),
    ({"capacity_bytes": "plenty"}, "100 GiB"),
    ({"capacity_bytes": ""}, "100 GiB"),
    ({"capacity_bytes": "nan GiB"}, "100 GiB"),
    ({"capacity_bytes": "12 parsecs"}, "100 GiB"),
    ({"capacity_bytes": 1.5}, "100 GiB"),
    ({"capacity_bytes": True}, "100 GiB"),
    ({"capacity_bytes": [1]}, "100 GiB"),
    ({"engine": "posxi"}, "Did you mean 'posix'"),
    ({"engine": ""}, "Allowed"),
    ({"engine": None}, "engine"),
    ({"engine": 3}, "engine"),
    ({"io_mode": "directt"}, "Did you mean 'direct'"),
    ({"io_mode": None}, "Allowed"),
    ({"verify": "allways"}, "Did you mean 'always'"),
    ({"verify": True}, "Allowed"),
    ({"layout": "page_frist"}, "Did you mean 'page_first'"),
    ({"threads": 0}, "threads"),
    ({"threads": -1}, "threads"),
    ({"threads": 1.5}, "threads"),
    ({"threads": True}, "threads"),
    ({"tp": (1, 1)}, "tp"),
    ({"tp": (-1, 2)}, "tp"),
    ({"tp": (0, 0)}, "tp"),
    ({"pp": 3}, "pp"),
    ({"cp": (0, 1, 2)}, "cp"),
    ({"tp": (0.0, 2)}, "tp"),
    ({"model": 7}, "model"),
    ({"model": "\ud800"}, "Unicode"),
    ({"tenant": b"salt"}, "tenant"),
    ({"pool": ""}, "pool"),
    ({"pool": "a/b"}, "pool"),
    ({"pool": ".."}, "pool"),
    ({"pool": "x" * 33}, "pool"),
    ({"capacty_bytes": "1 GiB"}, "'capacty_bytes' is not known. Did you mean 'capacity_bytes'"),
    ({"colour": "red"}, "option 'colour' is not known. Allowed: model"),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=[str(options) for options, _ in BAD_OPTIONS])
@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
def test_a_wrong_option_touches_nothing(shop, options, words, existing, keys):
    if existing:
        store = shop.open()
        shop.put(store, keys[:2])
        store.close()
    before = tree(shop.root.parent)
    with pytest.raises(InvalidArgumentError, match=words):
        shop.open(**options)
    assert tree(shop.root.parent) == before


@pytest.mark.parametrize("root", ["", "a\0b", None, 3, b"bytes"], ids=repr)
def test_a_root_that_is_no_path(root):
    with pytest.raises(InvalidArgumentError, match="root"):
        open_store(root, GEOMETRY, "page_first")


@pytest.mark.parametrize("name", ["root", "geometry", "layout"])
def test_an_argument_that_is_given_twice(tmp_path, name):
    with pytest.raises(InvalidArgumentError, match=f"{name} is given twice"):
        open_store(tmp_path / "root", GEOMETRY, "page_first", **{name: None})
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("geometry", [None, {}, "mha", GEOMETRY.as_dict()], ids=repr)
def test_a_geometry_that_is_none(tmp_path, geometry):
    with pytest.raises(InvalidArgumentError, match="KVGeometry"):
        open_store(tmp_path / "root", geometry, "page_first")
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("capacity", [1, PAGE_NBYTES - 1, PAGE_NBYTES, "8 KiB"])
def test_a_capacity_below_a_page(shop, capacity):
    with pytest.raises(StoreFullError, match="at least"):
        shop.open(capacity_bytes=capacity)
    assert not shop.root.exists()


def test_the_least_capacity_that_is_named_is_enough(shop, keys):
    with pytest.raises(StoreFullError) as caught:
        shop.open(capacity_bytes=PAGE_NBYTES)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    store = shop.open(capacity_bytes=least)
    assert shop.put(store, keys[:1]) == ["stored"]
    assert shop.get(store, keys[:1]) == ["loaded"]


def test_a_root_that_is_a_file(shop):
    shop.root.write_text("x")
    with pytest.raises(NotAStoreError, match="not a directory"):
        shop.open()
    assert shop.root.read_text() == "x"


def test_a_root_below_a_file(shop):
    shop.root.write_text("x")
    shop.root = shop.root / "below"
    with pytest.raises(StoreError):
        shop.open()


def test_a_root_full_of_other_things(shop):
    (shop.root / "photos").mkdir(parents=True)
    (shop.root / "letter.txt").write_text("dear")
    before = tree(shop.root)
    with pytest.raises(NotAStoreError, match=r"letter.txt, photos"):
        shop.open()
    assert tree(shop.root) == before


def test_a_root_that_is_not_there_is_not_made_to_be_read(shop):
    with pytest.raises(NotAStoreError, match="does not exist"):
        shop.open(read_only=True)
    assert not shop.root.exists()
    shop.root.mkdir()
    with pytest.raises(NotAStoreError, match="empty"):
        shop.open(read_only=True)


def test_a_root_that_cannot_be_written(shop, keys, monkeypatch):
    store = shop.open()
    shop.put(store, keys[:2])
    store.close()
    before = tree(shop.root)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(StoreError, match="read_only=True"):
            shop.open()
    assert tree(shop.root) == before
    assert shop.get(shop.open(read_only=True), keys[:2]) == ["loaded"] * 2


def later(path):
    document = json.loads(path.read_text())
    document["attributes"]["hicache_tier"]["version"] = FORMAT_VERSION + 1
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("what", ["namespace", "partition"])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_later_format_version_is_refused_naming_both(shop, keys, what, read_only):
    store = shop.open()
    shop.put(store, keys[:4])
    store.close()
    group = paths_of(store).root
    (group / "pages" / "zarr.json.tmp").write_text("a later version may have its own use for it")
    later((group if what == "partition" else shop.root / store.identity.namespace) / "zarr.json")
    before = {name: facts[1] for name, facts in tree(shop.root).items()}
    if read_only and what == "partition":
        reader = shop.open(read_only=True)
        assert shop.get(reader, keys[:4]) == ["absent"] * 4
        (why,) = reader._core.foreign.refused.values()
    else:
        with pytest.raises(FormatVersionError) as caught:
            shop.open(read_only=read_only)
        why = str(caught.value)
    assert f"version {FORMAT_VERSION + 1};" in why
    assert f"version {FORMAT_VERSION}." in why
    assert {name: facts[1] for name, facts in tree(shop.root).items()} == before


def test_another_geometry_of_one_model_is_another_namespace(shop, keys):
    store = shop.open()
    shop.put(store, keys[:2])
    other = KVGeometry.mha(num_layers=2, num_kv_heads=4, head_dim=32, dtype="bfloat16", page_tokens=8)
    assert other.page_nbytes == PAGE_NBYTES
    with open_store(shop.root, other, "page_first", model="m", capacity_bytes="2 MiB") as second:
        assert second.match_prefix(keys[:2]) == 0


BAD_POOLS = {
    "dtype": ArrayPool(
        KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16", page_tokens=8),
        "page_first",
        4,
    ),
    "layers": ArrayPool(GEOMETRY.with_layers(3), "page_first", 4),
    "kind": ArrayPool(
        KVGeometry.mla(num_layers=2, latent_dim=256, dtype="bfloat16", page_tokens=8), "page_first", 4
    ),
    "layout": ArrayPool(GEOMETRY, "layer_first", 4),
    "page_head": ArrayPool(GEOMETRY, "page_head", 4),
    "none": None,
    "array": np.zeros((4, PAGE_NBYTES), np.uint8),
}


@pytest.mark.parametrize("pool", BAD_POOLS)
def test_a_pool_that_does_not_fit(shop, keys, pool):
    store = shop.open()
    shop.put(store, keys[:2])
    before = {name: facts[1] for name, facts in tree(shop.root).items()}
    for call in (store.put, store.get):
        with pytest.raises(InvalidArgumentError, match=r"pool|axes"):
            call(keys[:2], BAD_POOLS[pool], [0, 1])
    assert {name: facts[1] for name, facts in tree(shop.root).items()} == before


BAD_PAGES = [
    [0, 512],
    [0, -1],
    [0, 1 << 62],
    [0.5, 1.0],
    [0, 1, 2],
    [[0], [1]],
    [[0], [1, 2]],
    [True, False],
    ["0", "1"],
    [None, 1],
    None,
    5,
    np.array([0, 1], np.float32),
    np.array(0),
]


@pytest.mark.parametrize("pages", BAD_PAGES, ids=[str(pages) for pages in BAD_PAGES])
def test_page_numbers_that_cannot_be(shop, keys, pages):
    store = shop.open()
    for call in (store.put, store.get):
        with pytest.raises(InvalidArgumentError):
            call(keys[:2], shop.host, pages)
    assert len(store) == 0
    assert not store._core.writing


BAD_KEYS: list[object] = [b"", "", "0", "0g", "g" * 64, 5, None, 1.5, [b"a"], (b"a",), object()]


@pytest.mark.parametrize(
    "key", BAD_KEYS, ids=[type(key).__name__ + str(at) for at, key in enumerate(BAD_KEYS)]
)
def test_keys_that_cannot_be(shop, keys, key):
    store = shop.open()
    shop.put(store, keys[:1])
    for call in (
        lambda: store.put([keys[1], key], shop.host, [0, 1]),
        lambda: store.put([keys[1]], shop.host, [0], parents=[key]),
        lambda: store.get([keys[0], key], shop.host, [0, 1]),
        lambda: store.match_prefix([keys[0], key]),
        lambda: store.contains([key]),
        lambda: store.delete([keys[0], key]),
        lambda: store.pin([key]),
    ):
        if key is None and call.__code__.co_consts and "parents" in str(call.__code__.co_names):
            continue
        try:
            call()
        except InvalidArgumentError as error:
            assert "key" in str(error)
        else:
            assert key is None  # no parent
    assert len(store) == 1 + (key is None)
    assert shop.get(store, keys[:1]) == ["loaded"]


def test_one_key_instead_of_many(shop, keys):
    store = shop.open()
    for wrong in (keys[0], keys[0].hex()):
        for call in (lambda w=wrong: store.put(w, shop.host, [0]), lambda w=wrong: store.delete(w)):
            with pytest.raises(InvalidArgumentError, match="sequence"):
                call()


def test_parents_of_another_number(shop, keys):
    store = shop.open()
    with pytest.raises(InvalidArgumentError, match="2 keys need as many parents"):
        store.put(keys[:2], shop.host, [0, 1], parents=[None])
    assert len(store) == 0


def test_every_error_is_one_of_ours():
    for kind in (InvalidArgumentError, NotAStoreError, StoreFullError, FormatVersionError):
        assert issubclass(kind, HiCacheTierError)
