"""Nothing in a root leads out of it: links and pipes in the place of files and folders are not followed."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from click.testing import CliRunner

from hicache_tier.cli import main
from hicache_tier.errors import StoreError
from hicache_tier.testing.store_rig import paths_of, slab_of, tree, writer_of
from hicache_tier_storage.inside import folder_of, open_inside, read_inside

FILES = ("zarr.json", "pages/zarr.json", "slots/zarr.json", "state/c.0", "slab", "table", "state/journal")
FOLDERS = ("pages", "slots", "state", ".", "..", "../..")


@pytest.fixture
def stored(shop, keys):
    """A store of two slabs, closed; its rig knows the partition."""
    store = shop.open()
    assert set(shop.put(store, keys[:32])) == {"stored"}
    shop.paths, shop.axes = paths_of(store), writer_of(store).facts.page_axes
    shop.first_slab = slab_of(store)
    store.close()
    return shop


def place(stored, name):
    if name == "slab":
        return stored.first_slab
    return stored.paths.table(0) if name == "table" else (stored.paths.root / name).resolve()


def move_out(path, outside):
    """Put a link to what was at `path` in its place."""
    outside.mkdir()
    shutil.move(path, outside / path.name)
    path.symlink_to(outside / path.name)
    return outside / path.name


def verbs(root, tmp_path):
    """Let every verb that reads look at a store; return what each said."""
    runner, said = CliRunner(), []
    for command in (["inspect"], ["verify"], ["export"]):
        rest = [str(root), str(tmp_path / "archive")] if command == ["export"] else [str(root)]
        result = runner.invoke(main, [*command, *rest, "--json"])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        said.append(result.output)
    return said


@pytest.mark.parametrize("name", FILES)
def test_a_file_behind_a_link_is_not_read_and_not_written(stored, keys, tmp_path, name):
    target = move_out(place(stored, name), tmp_path / "outside")
    before = tree(tmp_path / "outside")
    served = stored.open(read_only=True).match_prefix(keys)
    assert served == {"slab": 0, "table": 0, "zarr.json": 0}.get(name, 32)
    verbs(stored.root, tmp_path)
    store = stored.open()
    kept = store.match_prefix(keys)
    assert kept == {"slab": 0, "table": 0}.get(name, 32)
    assert set(stored.put(store, keys)) <= {"stored", "already_stored"}
    assert set(stored.get(store, keys)) == {"loaded"}
    store.clear()
    store.close()
    assert tree(tmp_path / "outside") == before
    assert target.exists()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_behind_a_link_is_not_served_by_anyone(stored, keys, tmp_path, name):
    move_out(place(stored, name), tmp_path / "outside")
    before = tree(tmp_path / "outside")
    with pytest.raises(StoreError, match="is a symbolic link"):
        stored.open()
    if name == "../..":
        with pytest.raises(StoreError, match="is a symbolic link"):
            stored.open(read_only=True)
    else:
        reader = stored.open(read_only=True)
        assert reader.match_prefix(keys) == (32 if name == "state" else 0)
    inspected, _, exported = verbs(stored.root, tmp_path)
    assert '"pages": 32' not in inspected or name == "state"
    assert '"pages": 32' not in exported or name == "state"
    assert tree(tmp_path / "outside") == before


def test_a_namespace_of_somebody_elses_store_is_not_exported(stored, tmp_path):
    root = tmp_path / "mine"
    root.mkdir()
    (root / ".hct.lock").touch()
    (root / stored.paths.root.parents[1].name).symlink_to(stored.paths.root.parents[1])
    inspected, _, exported = verbs(root, tmp_path)
    assert json.loads(inspected)["namespaces"] == []
    assert '"pages": 0' in exported or "error" in exported.lower()


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(stored, keys, tmp_path, name):
    path = place(stored, name)
    path.unlink()
    os.mkfifo(path)
    stored.open(read_only=True).match_prefix(keys)
    verbs(stored.root, tmp_path)
    if name == "state/journal":
        with pytest.raises(StoreError):
            stored.open()
        return
    store = stored.open()
    assert set(stored.put(store, keys)) <= {"stored", "already_stored"}
    assert set(stored.get(store, keys)) == {"loaded"}


def test_folders_that_become_links_between_a_look_and_an_open_are_not_entered(tmp_path):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"inside")
    assert read_inside(folder / "file", 3, 10) == b"inside"
    shutil.move(tmp_path / "a", tmp_path / "c")
    (tmp_path / "a").symlink_to(tmp_path / "c")
    for depth in (3, 4):
        with pytest.raises(OSError, match="symbolic link"):
            open_inside(folder / "file", depth)
    assert read_inside(folder / "file", 2, 10) == b"inside"  # a link above the root is its owner's affair
    with pytest.raises(FileNotFoundError), folder_of(tmp_path / "c" / "none" / "file", 2):
        pass


def test_a_file_larger_than_it_may_be_is_not_read(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="more than it can have"):
        read_inside(path, 1, 1 << 20)
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match=r"directory|plain file"):
        read_inside(path, 1, 1 << 20)
