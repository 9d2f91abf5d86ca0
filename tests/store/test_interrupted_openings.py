"""Ctrl-C while a store is being opened: whatever was opened is closed again."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_tier.testing.store_rig import GEOMETRY
from hicache_tier_storage import bounded_opening, keeper, open_store, opening, roots_opening
from hicache_tier_storage.calls import Lane

PATIENCE_S = 60.0


@pytest.fixture
def roots(memory_path):
    return [memory_path / "one", memory_path / "two"]


def open_them(roots, count, deadline_s):
    given = roots if count > 1 else roots[0]
    return open_store(given, GEOMETRY, "page_first", capacity_bytes="8 MiB", deadline_s=deadline_s)


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("hct-")}


@pytest.mark.parametrize(
    ("where", "name", "at", "count", "deadline_s"),
    [
        (Lane, "join", 1, 1, PATIENCE_S),
        (Lane, "join", 2, 2, PATIENCE_S),  # the first is of those that look where the roots lie
        (keeper.Keeper, "start", 1, 1, PATIENCE_S),
        (keeper.Keeper, "start", 1, 1, None),
        (keeper.Keeper, "start", 2, 2, PATIENCE_S),
        (keeper.Keeper, "start", 2, 2, None),
        (bounded_opening, "BoundedStore", 1, 1, PATIENCE_S),
        (roots_opening, "SeveralRoots", 1, 2, None),
        (roots_opening, "BoundedRoots", 1, 2, PATIENCE_S),
    ],
)
def test_what_was_opened_is_closed(roots, monkeypatch, where, name, at, count, deadline_s):
    """The signal raises as a call returns: while the last root is opened, or between that and the end."""
    before, opened, calls = threads(), [], []
    open_root, real = opening.open_root, getattr(where, name)

    def noted(*arguments):
        opened.append(open_root(*arguments))
        return opened[-1]

    def interrupted(*arguments):
        result = real(*arguments)
        calls.append(name)
        if len(calls) == at:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(opening, "open_root", noted)
        patch.setattr(where, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_them(roots, count, deadline_s)
    assert len(opened) == count - (name == "start")
    assert all(store.closed for store in opened)
    end = time.monotonic() + PATIENCE_S
    while threads() - before:
        assert time.monotonic() < end
        time.sleep(0.01)
    with open_them(roots, count, deadline_s) as store:
        for one in store.stores.values() if count > 1 else [store]:
            assert one.stats()["partition"].endswith("-w0/kv")
