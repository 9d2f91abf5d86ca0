"""Where an export writes, and what it never overwrites."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hicache_tier.errors import InvalidArgumentError, NotAStoreError
from hicache_tier.testing.store_rig import tree
from hicache_tier_storage.archive import (
    ArchiveExistsError,
    Selection,
    destination,
    export_archive,
    open_archive,
)


@pytest.mark.parametrize("name", ["archive", "archive.zip"])
def test_nothing_is_overwritten_unasked(shop, tmp_path, name):
    root, keys = shop.fill()
    target = tmp_path / name
    export_archive(root, target, selection=Selection(keys=frozenset(keys[:2])))
    before = tree(tmp_path)
    with pytest.raises(ArchiveExistsError, match="--overwrite"):
        export_archive(root, target)
    assert tree(tmp_path) == before
    export_archive(root, target, overwrite=True)
    assert shop.keys_in(target) == {*keys}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "store"])


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("name", ["archive", "archive.zip"])
def test_a_kill_while_an_archive_appears_loses_nothing(shop, tmp_path, monkeypatch, name):
    """At whichever step: the old archive or what goes on is there, and the same call again ends it."""
    root, keys = shop.fill()
    target, half = tmp_path / name, Selection(keys=frozenset(keys[:10]))
    for step in range(20):
        export_archive(root, target, selection=half, overwrite=target.exists())
        steps = []
        with monkeypatch.context() as patched:
            for owner, verb in ((Path, "rename"), (Path, "replace"), (shutil, "rmtree")):
                patched.setattr(owner, verb, dying(getattr(owner, verb), steps, step))
            finish = destination.FolderDestination.finish

            def armed(found, manifest, finish=finish, steps=steps):
                steps.append("begun")
                finish(found, manifest)

            patched.setattr(destination.FolderDestination, "finish", armed)
            try:
                export_archive(root, target, overwrite=True)
                break
            except Killed:
                pass
        if target.exists():
            assert shop.keys_in(target) in ({*keys[:10]}, {*keys})
        export_archive(root, target, overwrite=True)
        assert shop.keys_in(target) == {*keys}
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "store"])
        assert not list(tmp_path.glob("archive/.hct*"))
    assert step >= 3


def dying(real, steps, step):
    def call(*args, **options):
        if steps:
            steps.append(real.__name__)
            if len(steps) == step + 2:
                raise Killed
        return real(*args, **options)

    return call


def test_an_archive_that_a_kill_left_aside_is_put_back(shop, tmp_path, monkeypatch):
    root, keys = shop.fill()
    export_archive(root, tmp_path / "archive", selection=Selection(keys=frozenset(keys[:2])))
    rename = Path.rename

    def once(path, target):
        if path.name == "archive.partial":
            raise Killed
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", once)
        with pytest.raises(Killed):
            export_archive(root, tmp_path / "archive", overwrite=True)
    assert not (tmp_path / "archive").exists()
    with pytest.raises(ArchiveExistsError, match="--overwrite"):
        export_archive(root, tmp_path / "archive", codec="zstd")
    assert shop.keys_in(tmp_path / "archive") == {*keys[:2]}


@pytest.mark.parametrize("name", ["archive.replaced", "archive.zip.partial.zip"])
def test_folders_and_files_of_like_names_are_left_alone(shop, tmp_path, name):
    root, keys = shop.fill()
    mine = tmp_path / name
    mine.write_text("mine")
    for target in (tmp_path / "archive", tmp_path / "archive.zip"):
        for _ in range(2):
            export_archive(root, target, overwrite=target.exists())
        assert shop.keys_in(target) == {*keys}
    assert mine.read_text() == "mine"


def test_an_archive_with_which_other_things_are_kept_is_not_overwritten(shop, tmp_path):
    root, _ = shop.fill()
    export_archive(root, tmp_path / "archive")
    (tmp_path / "archive" / "thesis").mkdir()
    before = tree(tmp_path)
    with pytest.raises(ArchiveExistsError, match=r"thesis.*not overwritten"):
        export_archive(root, tmp_path / "archive", overwrite=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["mine", "mine.zip"])
def test_what_is_no_archive_is_never_overwritten(shop, tmp_path, name):
    root, _ = shop.fill()
    target = tmp_path / name
    if target.suffix:
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "zarr.json").write_text('{"attributes": {}}')
    before = tree(tmp_path)
    with pytest.raises(ArchiveExistsError, match="no archive"):
        export_archive(root, target, overwrite=True)
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(ArchiveExistsError, match="no archive"):
        export_archive(root, tmp_path / "link", overwrite=True)
    (tmp_path / "link").unlink()
    assert tree(tmp_path) == before


def test_a_folder_in_the_way_of_the_unfinished_archive(shop, tmp_path):
    root, _ = shop.fill()
    (tmp_path / "archive.partial").mkdir()
    (tmp_path / "archive.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(ArchiveExistsError, match="in the way"):
        export_archive(root, tmp_path / "archive", overwrite=True)
    assert (tmp_path / "archive.partial" / "thesis.txt").read_text() == "mine"


def test_wrong_arguments(shop, tmp_path):
    root, _ = shop.fill()
    before = tree(tmp_path)
    for error, options in [
        (InvalidArgumentError, {"codec": "fastest"}),
        (InvalidArgumentError, {"processes": 0}),
    ]:
        with pytest.raises(error):
            export_archive(root, tmp_path / "archive", **options)
    with pytest.raises(InvalidArgumentError):
        export_archive(root, "")
    with pytest.raises(InvalidArgumentError):
        Selection(first="last")
    with pytest.raises(ArchiveExistsError, match="inside the store"):
        export_archive(root, root / "archive")
    with pytest.raises(NotAStoreError):
        export_archive(tmp_path / "nothing", tmp_path / "archive")
    assert tree(tmp_path) == before


def test_a_destination_is_where_dots_lead(shop, tmp_path):
    root, _ = shop.fill()
    export_archive(root, tmp_path / "kv.zarr")
    with pytest.raises(ArchiveExistsError, match="exists"):
        export_archive(root, tmp_path / "nodir" / ".." / "kv.zarr", dry_run=True)
    export_archive(root, f"{tmp_path}/nodir/../new.zarr")
    assert open_archive(tmp_path / "new.zarr").parts and not (tmp_path / "nodir").exists()
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(ArchiveExistsError, match="inside the store"):
        export_archive(tmp_path / "link", tmp_path / "link" / "archive")
    with pytest.raises(InvalidArgumentError, match="name of its own"):
        export_archive(root, f"{tmp_path}/..")


def test_what_a_kill_in_the_last_moment_leaves_is_ignored(shop, tmp_path):
    root, keys = shop.fill()
    export_archive(root, tmp_path / "archive")
    (tmp_path / "archive" / ".hct-export" / "replaced").mkdir(parents=True)
    assert shop.keys_in(tmp_path / "archive") == {*keys}
    export_archive(root, tmp_path / "archive", overwrite=True)
    assert not [*(tmp_path / "archive").rglob(".hct*")]
