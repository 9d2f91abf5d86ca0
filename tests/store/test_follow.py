"""Lookups from memory alone, and following other writers when told to."""

from __future__ import annotations

import time

import pytest

from hicache_tier.errors import ClosedError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import StoreRig
from hicache_tier_storage.foreign import ForeignPages


@pytest.fixture(params=[1, 2])
def rig(tmp_path, request):
    rig = StoreRig(tmp_path / "one")
    if request.param == 2:
        rig.root = [tmp_path / "one", tmp_path / "two"]
    yield rig
    rig.close()


def test_without_following_nothing_is_looked_at(rig, monkeypatch):
    keys = keys_of("follow", 12)
    reader, writer = rig.open(), rig.open()
    assert all(rig.put(writer, keys))
    looks = []
    refresh = ForeignPages.refresh

    def counted(self):
        looks.append(self)
        refresh(self)

    monkeypatch.setattr(ForeignPages, "refresh", counted)
    monkeypatch.setattr(ForeignPages, "due", lambda self: True)
    assert reader.match_prefix(keys, follow=False) == 0
    assert reader.contains(keys, follow=False) == [False] * 12
    assert not looks
    until_s = time.monotonic() + 10
    while reader.match_prefix(keys, follow=False) < 12 and time.monotonic() < until_s:
        reader.follow()  # which finds a partition once it is complete
    assert looks
    assert reader.match_prefix(keys, follow=False) == 12
    assert all(reader.contains(keys, follow=False))


def test_a_closed_store_answers_nothing_from_memory(rig):
    store = rig.open()
    store.close()
    with pytest.raises(ClosedError):
        store.match_prefix(keys_of("follow", 1), follow=False)
