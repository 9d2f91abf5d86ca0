"""Archives in object stores."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import tree
from hicache_tier_storage.archive import (
    ArchiveError,
    ArchiveExistsError,
    NotAnArchiveError,
    export_archive,
    exporting,
    import_archive,
    open_archive,
)
from hicache_tier_storage.archive.places import Place


def test_object_stores(shop, tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed")
    root, keys = shop.fill()
    url = (tmp_path / "bucket" / "a").as_uri()
    report = export_archive(root, url, codec="fast")
    assert report.pages == 20
    with pytest.raises(ArchiveExistsError):
        export_archive(root, url)
    export_archive(root, url, overwrite=True)
    assert shop.keys_in(url) == {*keys}
    assert not [path for path in (tmp_path / "bucket").rglob("*") if ".hct" in str(path)]
    assert import_archive(url, tmp_path / "new").imported == 20
    assert shop.read(tmp_path / "new", keys) == shop.read(root, keys)


def test_an_object_export_that_was_stopped_goes_on(shop, tmp_path, small_shards, monkeypatch):
    pytest.importorskip("obstore", reason="obstore is not installed")
    root, keys = shop.fill(keys=keys_of("k", 21))
    url = (tmp_path / "bucket").as_uri()
    monkeypatch.setattr(exporting.PartWriter, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_archive(root, url, threads=1)
    monkeypatch.undo()
    monkeypatch.setattr(exporting, "shard_pages", lambda _: 4)
    with pytest.raises(NotAnArchiveError):
        open_archive(url)
    assert export_archive(root, url).resumed_pages == 20
    assert shop.keys_in(url) == {*keys}


def test_faults_of_an_object_store_are_told(shop, tmp_path):
    obstore = pytest.importorskip("obstore", reason="obstore is not installed")
    root, _ = shop.fill()
    with pytest.raises(ArchiveError, match="cannot be opened"):
        export_archive(root, "nowhere://bucket/a")
    url = (tmp_path / "bucket").as_uri()
    export_archive(root, url)
    with open_archive(url) as archive:

        class Broken:
            def get_range(self, *_, **__):
                raise obstore.exceptions.GenericError("the network is gone")

            head = get_range

        archive._source._store = Broken()
        out = np.zeros((20, shop.geometry.page_nbytes), np.uint8)
        with pytest.raises(ArchiveError, match="network is gone"):
            archive.parts[0].read_pages(np.arange(20), out)


def test_faults_of_an_object_store_are_told_in_words(shop, tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed")
    root, _ = shop.fill()
    (tmp_path / "file").write_text("")
    url = (tmp_path / "file" / "bucket").as_uri()
    told = []
    with pytest.raises(ArchiveError) as told_of_export:
        export_archive(root, url)
    told.append(str(told_of_export.value))
    with pytest.raises(ArchiveError) as told_of_import:
        open_archive((tmp_path / "bucket").as_uri())
    told.append(str(told_of_import.value))
    for text in told:
        assert "Debug source" not in text and "\n" not in text and "bucket" in text, text


def test_what_is_not_the_archives_stays_in_a_bucket(shop, tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed")
    root, _ = shop.fill()
    url = (tmp_path / "bucket").as_uri()
    export_archive(root, url)
    other = tmp_path / "bucket" / "other" / "zarr.json"
    other.parent.mkdir()
    other.write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(ArchiveExistsError, match=r"other.*not overwritten"):
        export_archive(root, url, overwrite=True)
    (tmp_path / "bucket" / "zarr.json").write_text('"no hct-archive"')
    with pytest.raises(ArchiveExistsError, match="no archive"):
        export_archive(root, url, overwrite=True)
    assert {*tree(tmp_path)} == {*before}


def test_file_urls_are_where_they_say(shop, tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed")
    root, keys = shop.fill()
    export_archive(root, (tmp_path / "a b").as_uri())
    assert shop.keys_in(tmp_path / "a b") == {*keys}
    with pytest.raises(ArchiveExistsError, match="inside the store"):
        export_archive(root, (root / "archive").as_uri())
    for url in ("file://etc/archive", "file://", "file:///", "http://[1/a"):
        with pytest.raises(InvalidArgumentError, match="URL"):
            export_archive(root, url)


def test_secrets_of_a_url_are_not_shown():
    place = Place.parse("s3://user:secret@bucket/a?token=secret#secret")
    assert place.text == "s3://user@bucket/a"
    assert Place.parse("abfss://container@account.dfs.core.windows.net/a").text.startswith(
        "abfss://container@"
    )


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_of_two_exports_to_one_prefix_the_last_goes_on(shop, tmp_path, small_shards, monkeypatch, codec):
    """Else the shards of one would lie under the index of the other."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    root, keys = shop.fill()
    url = (tmp_path / "bucket").as_uri()
    fill, second = exporting.fill, []

    def filled(*args):
        if not second:
            second.append(True)
            second.append(export_archive(root, url, codec=codec, overwrite=True, threads=1))
        return fill(*args)

    monkeypatch.setattr(exporting, "fill", filled)
    with pytest.raises(ArchiveExistsError, match="another process"):
        export_archive(root, url, threads=1)
    assert second[1].pages == 20
    assert shop.keys_in(url) == {*keys}
