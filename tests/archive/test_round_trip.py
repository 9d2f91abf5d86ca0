"""Store -> archive -> store: the same pages, whatever they are and however they are coded."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_tier.geometry import KVGeometry
from hicache_tier.testing.array_pool import keys_of, page_bytes
from hicache_tier_storage.archive import export_archive, import_archive, import_run, open_archive

GEOMETRIES = st.one_of(
    st.builds(
        KVGeometry.mha,
        num_layers=st.integers(1, 3),
        num_kv_heads=st.sampled_from([1, 2, 4]),
        head_dim=st.sampled_from([4, 8]),
        v_head_dim=st.sampled_from([None, 12]),
        dtype=st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn"]),
        page_tokens=st.sampled_from([1, 4]),
    ),
    st.builds(
        KVGeometry.mla,
        num_layers=st.integers(1, 3),
        latent_dim=st.sampled_from([36, 576]),
        dtype=st.sampled_from(["bfloat16", "float8_e5m2"]),
        page_tokens=st.sampled_from([2, 8]),
    ),
    st.builds(
        KVGeometry.indexer,
        num_layers=st.integers(1, 2),
        bytes_per_token=st.just(132),
        page_tokens=st.sampled_from([1, 8]),
    ),
)
IDENTITIES = st.fixed_dictionaries(
    {
        "model": st.sampled_from([None, "", "org/model"]),
        "adapter": st.sampled_from([None, "", "a"]),
        "tenant": st.sampled_from([None, "", "salt"]),
        "tp": st.sampled_from([(0, 1), (1, 2)]),
        "checksums": st.booleans(),
    }
)
FEW = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FEW
@given(
    geometry=GEOMETRIES,
    options=IDENTITIES,
    codec=st.sampled_from(["none", "fast", "small", "zstd"]),
    layout=st.sampled_from(["page_first", "layer_first", "page_first_direct"]),
    count=st.integers(1, 40),
    suffix=st.sampled_from(["", ".zip"]),
)
def test_every_store_comes_back(tmp_path, shop_class, geometry, options, codec, layout, count, suffix):
    shop = shop_class(Path(tempfile.mkdtemp(dir=tmp_path)))
    keys = [*keys_of("k", count), b"\x01short"]
    root, _ = shop.fill("old", geometry, layout, keys, **options)
    archive = shop.folder / f"archive{suffix}"
    report = export_archive(root, archive, codec=codec)
    assert (report.pages, report.left_out) == (len(keys), {})
    tenants = () if options["tenant"] is None else (options["tenant"],)
    found = import_archive(archive, shop.folder / "new", tenants=tenants, capacity_bytes="4 MiB")
    assert (found.imported, found.refused) == (len(keys), {})
    pages = shop.read(shop.folder / "new", keys, geometry, layout, **options)
    assert pages == {key: page_bytes(key, geometry.page_nbytes) for key in keys}


@pytest.mark.parametrize("processes", [1, 2])
def test_shards_are_full_but_the_last(shop, monkeypatch, processes):
    root, keys = shop.fill(keys=keys_of("k", 23))
    monkeypatch.setattr("hicache_tier_storage.archive.exporting.shard_pages", lambda _: 4)
    export_archive(root, shop.folder / "archive", processes=processes)
    with open_archive(shop.folder / "archive") as archive:
        (part,) = archive.parts
        assert (part.facts.pages, part.facts.shard) == (23, 4)
        out = np.zeros((23, part.facts.geometry.page_nbytes), np.uint8)
        assert part.read_pages(np.arange(23), out) == [""] * 23
        rows = part.rows(np.arange(23))
        assert {row["key"].tobytes() for row in rows} == {*keys}


def test_what_is_there_is_skipped_and_parents_are_kept(shop):
    root, keys = shop.fill()
    export_archive(root, shop.folder / "archive")
    shop.fill("new", keys=keys[:5])
    report = import_archive(shop.folder / "archive", shop.folder / "new")
    assert (report.imported, report.already_stored) == (15, 5)
    again = import_archive(shop.folder / "archive", shop.folder / "new")
    assert (again.imported, again.already_stored, again.nbytes) == (0, 20, 0)
    from hicache_tier_storage.inspection import inspect_root

    (space,) = inspect_root(shop.folder / "new")["namespaces"]
    chains = [part["chains"] for part in space["partitions"]]
    assert [(chain["longest"], chain["orphans"]) for chain in chains] == [(20, 0)]


def test_nothing_is_pushed_out_and_whole_prefixes_come_first(shop):
    root, keys = shop.fill()
    export_archive(root, shop.folder / "archive")
    page = 4096
    _, mine = shop.fill("new", keys=keys_of("mine", 6), capacity_bytes=16 * page + 8192)
    report = import_archive(shop.folder / "archive", shop.folder / "new")
    assert report.imported + report.refused["capacity"] == 20
    assert 0 < report.imported < 20
    assert len(shop.read(shop.folder / "new", mine)) == 6
    assert [*shop.read(shop.folder / "new", keys)] == keys[: report.imported]


def test_ranks_share_the_room(shop):
    """Where there is room for some pages only, ranks get the same ones, up to a page of rounding."""
    keys = keys_of("p", 20)
    for rank in range(2):
        root, _ = shop.fill("old", keys=keys, tp=(rank, 2))
    export_archive(root, shop.folder / "archive")
    report = import_archive(shop.folder / "archive", shop.folder / "new", capacity_bytes=24 * 4096 + 8192)
    assert report.imported + report.refused["capacity"] == 40
    found = [[*shop.read(shop.folder / "new", keys, tp=(rank, 2))] for rank in range(2)]
    counts = [len(pages) for pages in found]
    assert found == [keys[:count] for count in counts]
    assert sum(counts) == report.imported < 40
    assert 0 <= counts[1] - counts[0] <= 1


def test_a_stopped_import_goes_on(shop, monkeypatch):
    root, keys = shop.fill()
    export_archive(root, shop.folder / "archive")
    monkeypatch.setattr(import_run, "_BATCH_NBYTES", 4 * 2048)
    write, calls = import_run.BatchWriter.write, []

    def stop(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return write(*args)

    monkeypatch.setattr(import_run.BatchWriter, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        import_archive(shop.folder / "archive", shop.folder / "new", threads=1)
    monkeypatch.undo()
    there = shop.read(shop.folder / "new", keys)
    assert 8 <= len(there) < 20
    report = import_archive(shop.folder / "archive", shop.folder / "new")
    assert (report.already_stored, report.imported) == (len(there), 20 - len(there))
    assert shop.read(shop.folder / "new", keys) == shop.read(root, keys)
