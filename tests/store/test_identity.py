"""Wrong bytes are never found under the right name."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache_tier.geometry import KVGeometry
from hicache_tier.testing.array_pool import ArrayPool, fill_pages, keys_of, pages_equal, read_page, write_page
from hicache_tier.testing.faults import FaultyEngine, Hang, going_out
from hicache_tier_storage import open_store, slab
from hicache_tier_storage.posix import PosixEngine

OPTIONS = {"capacity_bytes": "1 MiB", "io_mode": "buffered", "threads": 1}
BASE = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 16, "dtype": "bfloat16", "page_tokens": 4}
NAMES = {"model": "m", "revision": "r", "tenant": "t", "adapter": "a", "scales": "s", "rope": "p"}


def variants():
    """Identities that differ from the first one in one thing each; most have pages of as many bytes."""
    yield "base", BASE, "page_first", NAMES
    for name, values in {
        "dtype": ["float16", "int8"],
        "num_layers": [4],
        "page_tokens": [8],
        "num_kv_heads": [8],
        "head_dim": [32],
    }.items():
        for value in values:
            yield f"{name}={value}", BASE | {name: value}, "page_first", NAMES
    yield "heads split", BASE | {"num_kv_heads": 2, "head_dim": 32}, "page_first", NAMES
    yield "tokens for layers", BASE | {"num_layers": 4, "page_tokens": 2}, "page_first", NAMES
    yield "v differs", BASE | {"head_dim": 24, "v_head_dim": 8}, "page_first", NAMES
    for layout in ("layer_first", "page_head"):
        yield layout, BASE, layout, NAMES
    for name, own in NAMES.items():
        for value in (None, "", "other", own + "\0", " " + own, own.upper()):
            yield f"{name}={value!r}", BASE, "page_first", NAMES | {name: value}
    yield "key_algorithm", BASE, "page_first", NAMES | {"key_algorithm": None}
    yield "pool", BASE, "page_first", NAMES | {"pool": "draft"}
    for axis in ("tp", "pp", "cp"):
        for coordinate in ((0, 2), (1, 2), (0, 4)):
            yield f"{axis}={coordinate}", BASE, "page_first", NAMES | {axis: coordinate}


def test_every_field_separates(memory_path, monkeypatch):
    """One key, written under every identity with bytes of its own: each reads back its own."""
    monkeypatch.setattr(slab, "SLAB_TARGET_NBYTES", 32 << 10)  # so that all have room
    options = OPTIONS | {"capacity_bytes": "64 MiB"}
    written = {}
    for number, (name, shape, layout, names) in enumerate(variants()):
        geometry = KVGeometry.mha(**shape)
        host = ArrayPool(geometry, layout, 2)
        with open_store(memory_path, geometry, layout, **options, **names) as store:
            assert store.match_prefix([b"key"]) == 0, f"{name} sees another identity's page"
            write_page(host, 0, bytes([number]) * geometry.page_nbytes)
            assert store.put([b"key"], host, [0]) == [1]
        written[name] = number
    for name, shape, layout, names in variants():
        geometry = KVGeometry.mha(**shape)
        host = ArrayPool(geometry, layout, 2)
        with open_store(memory_path, geometry, layout, **options, **names, read_only=True) as store:
            assert store.get([b"key"], host, [1]) == [1], name
            write_page(host, 0, bytes([written[name]]) * geometry.page_nbytes)
            assert read_page(host, 0) == read_page(host, 1), name


def test_a_late_write_of_the_old_weights_is_never_served_to_the_new(memory_path):
    """Weights are updated while the server runs: what was under way lands where it belongs."""
    geometry, keys = KVGeometry.mha(**BASE), keys_of("weights", 4)
    host = ArrayPool(geometry, "page_first", 8)
    hang = Hang(going_out)
    engine = FaultyEngine(PosixEngine(direct=False, threads=1), hang)
    options = {"capacity_bytes": "1 MiB", "model": "m", "engine": engine}
    old = open_store(memory_path, geometry, "page_first", **options, revision="1")
    write_page(host, 0, b"\1" * geometry.page_nbytes)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(old.put, keys, host, [0] * 4)
        hang.gate.wait_for()
        with open_store(memory_path, geometry, "page_first", **options, revision="2") as new:
            hang.gate.open()
            assert all(late.result(20)), "it was stored, under the old weights"
            new._core.foreign._next_poll = new._core.foreign._next_scan = 0
            assert new.match_prefix(keys) == 0
            assert not any(new.get(keys, host, range(4, 8)))
            write_page(host, 1, b"\2" * geometry.page_nbytes)
            assert [status.reason for status in new.put(keys, host, [1] * 4)] == ["stored"] * 4
            for store, value in ((old, 1), (new, 2)):
                assert all(store.get(keys, host, range(4, 8)))
                assert read_page(host, 5) == bytes([value]) * geometry.page_nbytes
    old.close()
    engine.close()


STRANGE = {
    "long": "x" * 250,
    "very long": "y" * 100_000,
    "slash": "org/m",
    "dash": "org-m",
    "up": "../../x",
    "root": "/etc/passwd",
    "nul": "a\0b",
    "letters": "模型-модель-🤖",
    "composed": "é",
    "decomposed": "e\u0301",
    "upper": "ORG/M",
    "dots": "..",
    "newline": "a\nb",
    "blank": " ",
    "empty": "",
    "none": None,
}


@pytest.mark.parametrize("field", ["model", "tenant", "adapter"])
def test_names_of_every_kind_stay_in_the_root_and_apart(memory_path, field):
    geometry = KVGeometry.mha(**BASE)
    root = memory_path / "in" / "root"
    for name in STRANGE.values():
        with open_store(root, geometry, "page_first", **OPTIONS, **{field: name}) as store:
            assert store.match_prefix([b"key"]) == 0
            assert store.put([b"key"], ArrayPool(geometry, "page_first", 1), [0]) == [1]
    spaces = [path for path in root.iterdir() if path.is_dir()]
    assert len(spaces) == len(STRANGE)
    assert all(len(path.name) == 32 and set(path.name) <= set("0123456789abcdef") for path in spaces)
    assert [path.name for path in memory_path.iterdir()] == ["in"]
    assert [path.name for path in (memory_path / "in").iterdir()] == ["root"]


def test_tenant_and_adapter_do_not_run_into_each_other(memory_path):
    geometry = KVGeometry.mha(**BASE)
    values = [None, "", "a", "b", "ab", "ba"]
    spaces = set()
    for tenant, adapter in itertools.product(values, values):
        with open_store(
            memory_path, geometry, "page_first", **OPTIONS, tenant=tenant, adapter=adapter
        ) as store:
            spaces.add(store.identity.namespace)
    assert len(spaces) == len(values) ** 2


def test_the_tenants_salt_is_nowhere_on_disk(memory_path):
    geometry = KVGeometry.mha(**BASE)
    salt = "a very secret salt"
    with open_store(memory_path, geometry, "page_first", **OPTIONS, tenant=salt) as store:
        store.put([b"key"], ArrayPool(geometry, "page_first", 1), [0])
    assert not [
        path for path in memory_path.rglob("*") if path.is_file() and salt.encode() in path.read_bytes()
    ]


def test_every_coordinate_reads_back_its_own(memory_path):
    geometry = KVGeometry.mha(**BASE)
    nbytes = geometry.page_nbytes
    keys = keys_of("rank", 2)
    coordinates = list(itertools.product(range(2), range(2), range(2)))
    host = ArrayPool(geometry, "page_first", 4)
    for step in ("write", "read"):
        for tp, pp, cp in coordinates:
            names = {"tp": (tp, 2), "pp": (pp, 2), "cp": (cp, 2)}
            own = keys_of(f"{tp}{pp}{cp}", 2)
            with open_store(memory_path, geometry, "page_first", **OPTIONS, **names) as store:
                if step == "write":
                    assert store.match_prefix(keys) == 0
                    fill_pages(host, [0, 1], own, nbytes)
                    assert all(store.put(keys, host, [0, 1]))
                else:
                    assert all(store.get(keys, host, [2, 3]))
                    assert all(pages_equal(host, [2, 3], own, nbytes))


@pytest.mark.parametrize("kind", ["mla", "indexer"])
def test_a_replicated_axis_is_written_once_and_read_by_all(memory_path, kind):
    geometry = (
        KVGeometry.mla(num_layers=2, latent_dim=72, dtype="bfloat16", page_tokens=4)
        if kind == "mla"
        else KVGeometry.indexer(num_layers=2, bytes_per_token=132, page_tokens=4)
    )
    host = ArrayPool(geometry, "page_first", 8)
    keys = keys_of("shared", 4)
    fill_pages(host, range(4), keys, geometry.page_nbytes)
    stores = [open_store(memory_path, geometry, "page_first", **OPTIONS, tp=(rank, 4)) for rank in range(4)]
    try:
        assert [status.reason for status in stores[0].put(keys, host, range(4))] == ["stored"] * 4
        for store in stores[1:]:
            store._core.foreign._next_poll = store._core.foreign._next_scan = 0
            assert [s.reason for s in store.put(keys, host, range(4))] == ["already_stored"] * 4
            assert all(store.get(keys, host, range(4, 8)))
            assert all(pages_equal(host, range(4, 8), keys, geometry.page_nbytes))
    finally:
        for store in stores:
            store.close()
