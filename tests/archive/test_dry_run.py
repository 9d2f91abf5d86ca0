"""Dry runs promise what the import or export then does, and refuse what it refuses."""

from __future__ import annotations

import os

import pytest

from hicache_tier.errors import EncryptionError, StoreError, StoreFullError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import tree
from hicache_tier_storage.archive import (
    ArchiveError,
    ArchiveExistsError,
    export_archive,
    exporting,
    import_archive,
)


def both(archive, root, error, match, **options):
    """A dry run and the import itself refuse alike."""
    for dry_run in (True, False):
        with pytest.raises(error, match=match):
            import_archive(archive, root, dry_run=dry_run, **options)


@pytest.fixture
def foreign_key(tmp_path):
    path = tmp_path / "key"
    path.write_text("5a" * 32 + "\n")
    path.chmod(0o600)
    return path


def test_a_dry_run_refuses_what_the_import_refuses(shop, tmp_path, foreign_key, monkeypatch):
    root, _ = shop.fill()
    export_archive(root, tmp_path / "archive")
    other, _ = shop.fill("other", model="another")
    sealed, _ = shop.fill("sealed", encryption=foreign_key)
    both(tmp_path / "archive", sealed, EncryptionError, "name the key file")
    both(tmp_path / "archive", other, StoreFullError, "holds no page", capacity_bytes=4096)
    both(tmp_path / "archive", tmp_path / "new", StoreFullError, "holds no page", capacity_bytes=4096)
    (tmp_path / "file").write_text("")
    both(
        tmp_path / "archive", tmp_path / "file" / "new", StoreError, "cannot be|not a directory|is no folder"
    )
    assert not (tmp_path / "new").exists()
    owner = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    if other.stat().st_uid == 0:
        os.chown(other, owner + 1, -1)
    both(tmp_path / "archive", other, StoreError, "belongs to user")


@pytest.mark.parametrize("there", [False, True])
def test_a_dry_run_is_bound_by_the_capacity(shop, tmp_path, there):
    keys = keys_of("k", 41)
    for rank in range(2):
        root, _ = shop.fill(keys=keys, tp=(rank, 2))
    export_archive(root, tmp_path / "archive")
    if there:
        shop.fill("new", keys=keys[:3], tp=(0, 2), capacity_bytes=150_000)
    told = [
        import_archive(tmp_path / "archive", tmp_path / "new", capacity_bytes=150_000, dry_run=dry_run)
        for dry_run in (True, False)
    ]
    assert told[0].refused["capacity"] > 0
    assert [(one.imported, one.already_stored, one.refused) for one in told[1:]] == [
        (told[0].imported, told[0].already_stored, told[0].refused)
    ]


def test_a_dry_run_refuses_a_destination_that_cannot_be_made(shop, tmp_path, monkeypatch):
    root, _ = shop.fill()
    (tmp_path / "file").write_text("")
    for dry_run in (True, False):
        for place in (tmp_path / "file" / "archive", (tmp_path / "file" / "archive").as_uri()):
            with pytest.raises(ArchiveError, match="is no folder"):
                export_archive(root, place, dry_run=dry_run)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ArchiveError, match="is not writable"):
        export_archive(root, tmp_path / "archive", dry_run=True)


@pytest.fixture(params=["folder", "zip", "objects"])
def place(request, tmp_path):
    if request.param == "objects":
        pytest.importorskip("obstore", reason="obstore is not installed")
        return (tmp_path / "bucket" / "a").as_uri()
    return tmp_path / {"folder": "archive", "zip": "archive.zip"}[request.param]


def test_a_dry_run_refuses_an_archive_that_is_there(shop, tmp_path, place):
    root, _ = shop.fill()
    assert export_archive(root, place, dry_run=True).pages == 20
    assert {path.name for path in tmp_path.iterdir()} == {root.name}, "it makes nothing"
    export_archive(root, place)
    before = tree(tmp_path)
    for dry_run in (True, False):
        with pytest.raises(ArchiveExistsError, match="--overwrite replaces it"):
            export_archive(root, place, dry_run=dry_run)
    assert export_archive(root, place, dry_run=True, overwrite=True).pages == 20
    assert tree(tmp_path) == before


def test_a_dry_run_refuses_an_unfinished_export_with_other_options(shop, place, monkeypatch):
    root, _ = shop.fill()
    with monkeypatch.context() as patched:
        patched.setattr(exporting.PartWriter, "write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export_archive(root, place)
    for dry_run in (True, False):
        with pytest.raises(ArchiveExistsError, match=r"other options \(codec"):
            export_archive(root, place, codec="zstd", dry_run=dry_run)
    assert export_archive(root, place, dry_run=True).pages == 20
    assert export_archive(root, place, codec="zstd", dry_run=True, overwrite=True).pages == 20


def test_a_dry_run_refuses_what_is_no_archive(shop, tmp_path, place):
    root, _ = shop.fill()
    folder = tmp_path / "bucket" / "a" if isinstance(place, str) else place
    folder.parent.mkdir(exist_ok=True)
    if folder.suffix:
        folder.write_text("mine")
    else:
        folder.mkdir()
        (folder / "mine").write_text("mine")
    for dry_run in (True, False):
        with pytest.raises(ArchiveExistsError, match="no archive"):
            export_archive(root, place, dry_run=dry_run, overwrite=True)
