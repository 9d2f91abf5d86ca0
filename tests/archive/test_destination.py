"""Where an export writes, and what it never overwrites."""

from __future__ import annotations

import pytest

from hicache_tier.errors import InvalidArgumentError, NotAStoreError
from hicache_tier.testing.store_rig import tree
from hicache_tier_storage.archive import ArchiveExistsError, Selection, export_archive, open_archive


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
