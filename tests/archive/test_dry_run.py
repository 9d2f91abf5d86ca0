"""Dry runs promise what the import or export then does, and refuse what it refuses."""

from __future__ import annotations

import errno
import os

import pytest

from hicache_tier.errors import EncryptionError, StoreError, StoreFullError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import tree
from hicache_tier_storage.archive import (
    ArchiveError,
    ArchiveExistsError,
    destination,
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


def in_the_way(work, what):
    """Put something where an export would keep what is not finished."""
    state = work / ".hct-export"
    if what == "file":
        work.write_text("mine")
    elif what == "folder":
        work.mkdir()
        (work / "thesis.txt").write_text("mine")
    elif what == "folder as its job":
        (state / "job.json").mkdir(parents=True)
    else:
        (work.parent / "mine" / "there").mkdir(parents=True)
        if what == "link":
            work.symlink_to("mine")
        elif what == "link to nothing":
            work.symlink_to("nothing")
        else:
            work.mkdir()
            state.symlink_to("../mine")


@pytest.mark.parametrize(
    "what", ["file", "folder", "folder as its job", "link", "link to nothing", "link as its state"]
)
@pytest.mark.parametrize("name", ["archive", "archive.zip"])
def test_a_dry_run_refuses_what_is_in_the_way_of_the_unfinished_archive(shop, tmp_path, name, what):
    root, _ = shop.fill()
    in_the_way(tmp_path / f"{name}.partial", what)
    before = tree(tmp_path)
    for overwrite in (False, True):
        for dry_run in (True, False):
            with pytest.raises(ArchiveExistsError, match="in the way"):
                export_archive(root, tmp_path / name, dry_run=dry_run, overwrite=overwrite)
    assert tree(tmp_path) == before


def test_a_dry_run_refuses_a_name_that_is_too_long_and_a_job_that_cannot_be_read(shop, tmp_path, monkeypatch):
    root, _ = shop.fill()
    for length in (250, 256):
        for dry_run in (True, False):
            with pytest.raises(ArchiveError, match="too long"):
                export_archive(root, tmp_path / ("a" * length), dry_run=dry_run)
    monkeypatch.setattr(destination, "read_inside", denied)
    for dry_run in (True, False):
        with pytest.raises(ArchiveError, match=r"job\.json cannot be read: Permission denied"):
            export_archive(root, tmp_path / "archive", dry_run=dry_run)


def denied(*_):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_dry_run_sees_an_archive_that_a_kill_left_aside(shop, tmp_path):
    """The export puts it back, and then refuses to replace it unasked."""
    root, _ = shop.fill()
    target, aside = tmp_path / "archive", tmp_path / "archive.partial" / ".hct-export" / "replaced"
    export_archive(root, target)
    aside.parent.mkdir(parents=True)
    target.rename(aside)
    before = tree(tmp_path)
    with pytest.raises(ArchiveExistsError, match="--overwrite replaces it"):
        export_archive(root, target, dry_run=True)
    assert export_archive(root, target, dry_run=True, overwrite=True).pages == 20
    assert tree(tmp_path) == before
