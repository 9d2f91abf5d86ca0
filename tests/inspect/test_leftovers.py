"""What a writer clears away when it opens a partition: its own leftovers, never what others put there."""

from __future__ import annotations

import errno
import pathlib

import pytest

from hicache_tier.errors import StoreError
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
    (stored.partition / "zarr.json").write_text("{}")  # a partition that cannot be used is made anew
    with tools.open_store(stored.root) as store:
        assert store.match_prefix(stored.keys) == 0
    assert all(path.exists() for path in foreign)
    found = inspect_root(stored.root)["foreign"]
    assert sorted(found) == sorted(str(path.relative_to(stored.root)) for path in foreign)


def test_a_partition_that_cannot_be_read_now_is_kept(stored, tools, monkeypatch):
    group, real = stored.partition / "zarr.json", pathlib.Path.open

    def refused(path, *args, **options):
        if path == group:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "open", refused)
        with pytest.raises(StoreError, match="Too many open files"):
            tools.open_store(stored.root)
    with tools.open_store(stored.root) as store:
        assert store.match_prefix(stored.keys) == tools.count
