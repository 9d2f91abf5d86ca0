"""What a writer clears away when it opens a partition: its own leftovers, never what others put there."""

from __future__ import annotations

import errno

import pytest

from hicache_tier.errors import StoreError
from hicache_tier_storage import metadata
from hicache_tier_storage import state as states
from hicache_tier_storage.inspection import inspect_root


def test_only_the_stores_own_leftovers_go(stored, tools):
    pages = stored.partition / "pages"
    own = [pages / "c.9.0.0.0.0.0.tmp", stored.partition / "zarr.json.tmp"]
    foreign = [pages / "c.0.backup", pages / "notes.tmp", stored.partition / "mine.tmp"]
    for path in own + foreign:
        path.write_text("x")
    with tools.open_store(stored.root) as store:
        assert store.match_prefix(stored.keys) == tools.count
    assert not any(path.exists() for path in own)
    (stored.partition / "zarr.json").write_text("{}")
    (stored.partition / "state" / "c.0").write_text("{}")  # a partition that nothing describes is made anew
    with tools.open_store(stored.root) as store:
        assert store.match_prefix(stored.keys) == 0
    assert all(path.exists() for path in foreign)
    found = inspect_root(stored.root)["foreign"]
    assert sorted(found) == sorted(str(path.relative_to(stored.root)) for path in foreign)


def test_a_partition_that_cannot_be_read_now_is_kept(stored, tools, monkeypatch):
    group, real = stored.partition / "zarr.json", metadata.read_inside

    def refused(path, *args):
        if path == group:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *args)

    with monkeypatch.context() as patched:
        patched.setattr(metadata, "read_inside", refused)
        with pytest.raises(StoreError, match="Too many open files"):
            tools.open_store(stored.root)
    with tools.open_store(stored.root) as store:
        assert store.match_prefix(stored.keys) == tools.count


def test_a_damaged_namespace_group_is_written_again(stored, tools):
    group = stored.partition.parent.parent / "zarr.json"
    before = group.read_text()
    group.write_text("{")
    with tools.open_store(stored.root) as store:
        assert store.match_prefix(stored.keys) == tools.count
    assert group.read_text() == before


def test_a_state_block_that_cannot_be_read_now_is_an_error_not_a_loss(stored, tools, monkeypatch):
    state, real = stored.partition / "state" / "c.0", states.read_inside

    def refused(path, *args):
        if path == state:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *args)

    with monkeypatch.context() as patched:
        patched.setattr(states, "read_inside", refused)
        with pytest.raises(StoreError):
            tools.open_store(stored.root)
    with tools.open_store(stored.root) as store:
        assert store.match_prefix(stored.keys) == tools.count
        assert store.stats()["suspect_pages"] == 0
