"""Power loss: pages written under another boot and not synced are verified before they are served."""

from __future__ import annotations

import pytest

from hicache_tier.testing.faults import FaultyEngine, LoseUnsynced
from hicache_tier.testing.store_rig import PAGE_NBYTES, paths_of, slab_of, slot_of, writer_of
from hicache_tier_storage import recovery, root_opening, writer
from hicache_tier_storage.posix import PosixEngine
from hicache_tier_storage.state import StateBlock


def boot(patch, name):
    for module in (root_opening, recovery, writer):
        patch.setattr(module, "boot_id", lambda: name.ljust(16, b"\0"))


@pytest.fixture
def crashed(shop, keys, monkeypatch):
    """Leave a partition as power loss would: not closed, and now another boot."""

    def crash(store):
        writer_of(store).abandon()
        store._core.writer = store._putter = store._keeper = None
        boot(monkeypatch, b"second")

    boot(monkeypatch, b"first")
    return crash


def damage(store, key):
    number, slot = slot_of(store, key)
    with slab_of(store, number).open("r+b") as file:
        file.seek(slot * PAGE_NBYTES + 100)
        file.write(b"lost")


def test_pages_are_verified_at_their_first_read_and_damaged_ones_dropped(shop, keys, crashed):
    store = shop.open()
    shop.put(store, keys[:10])
    damage(store, keys[3])
    crashed(store)
    store = shop.open()
    assert store.stats()["suspect_pages"] == 10
    assert store.match_prefix(keys) == 10
    assert shop.get(store, keys[:6]) == ["loaded"] * 3 + ["checksum"] + ["loaded"] * 2
    assert store.stats()["suspect_pages"] == 4
    assert store.match_prefix(keys) == 3
    assert shop.put(store, keys[3:4]) == ["stored"]
    damage(store, keys[0])  # verified already: this boot is trusted
    with pytest.raises(AssertionError, match="wrong bytes"):
        shop.get(store, keys[:1])
    assert shop.get(store, keys[1:10]) == ["loaded"] * 9
    assert store.stats()["suspect_pages"] == 0


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_a_power_loss_costs_what_did_not_reach_the_disk(shop, keys, crashed, share):
    """Slot tables reached it, some payloads did not: those pages are misses, and can be stored again."""
    loss = LoseUnsynced()
    engine = FaultyEngine(PosixEngine(direct=False, threads=2), loss)
    store = shop.open(engine=engine, io_mode="auto", threads=None)
    shop.put(store, keys[:10])
    loss.sync()
    shop.put(store, keys[10:40])
    lost = loss.lose(share, seed=5)
    assert 0 < lost <= 30
    crashed(store)
    store = shop.open()
    reasons = shop.get(store, keys[:40])
    assert reasons[:10] == ["loaded"] * 10
    assert (reasons.count("checksum"), reasons.count("loaded")) == (lost, 40 - lost)
    assert shop.put(store, keys[:40]).count("stored") == lost
    assert shop.get(store, keys[:40]) == ["loaded"] * 40


def test_pages_without_a_checksum_are_dropped_at_once(shop, keys, crashed):
    store = shop.open(checksums=False)
    shop.put(store, keys[:10])
    crashed(store)
    store = shop.open()
    assert store.match_prefix(keys) == 0
    assert len(store) == 0
    assert shop.put(store, keys[:10]) == ["stored"] * 10


def test_a_killed_process_alone_makes_nothing_suspect(shop, keys):
    store = shop.open(checksums=False)
    shop.put(store, keys[:10])
    writer_of(store).abandon()
    store._core.writer = store._putter = store._keeper = None
    store = shop.open()
    assert store.stats()["suspect_pages"] == 0
    assert shop.get(store, keys[:10]) == ["loaded"] * 10


def test_a_clean_close_is_trusted_by_the_next_boot(shop, keys, monkeypatch):
    boot(monkeypatch, b"first")
    store = shop.open(checksums=False)
    shop.put(store, keys[:10])
    store.close()
    boot(monkeypatch, b"second")
    store = shop.open()
    assert store.stats()["suspect_pages"] == 0
    assert shop.get(store, keys[:10]) == ["loaded"] * 10


def test_suspicion_outlives_a_clean_close_until_every_page_was_read(shop, keys, crashed):
    store = shop.open()
    shop.put(store, keys[:10])
    damage(store, keys[9])
    crashed(store)
    store = shop.open()
    shop.get(store, keys[:5])
    store.close()
    store = shop.open()
    assert store.stats()["suspect_pages"] > 0
    assert shop.get(store, keys[:10]) == ["loaded"] * 9 + ["checksum"]
    store.close()
    paths = paths_of(store)
    state = StateBlock.unpack(paths.state.read_bytes(), paths.state)
    assert state.clean
    assert state.boot_id.startswith(b"second")
    store = shop.open()
    assert store.stats()["suspect_pages"] == 0


def test_suspect_pages_that_are_deleted_leave_no_suspicion(shop, keys, crashed):
    store = shop.open()
    shop.put(store, keys[:10])
    crashed(store)
    store = shop.open()
    store.delete(keys[:10])
    assert store.stats()["suspect_pages"] == 0
    store.close()
    assert StateBlock.unpack(paths_of(store).state.read_bytes(), "state").clean


def test_a_reader_verifies_what_no_writer_has_taken_over(shop, keys, crashed):
    store = shop.open()
    shop.put(store, keys[:10])
    damage(store, keys[3])
    crashed(store)
    reader = shop.open(read_only=True)
    assert shop.get(reader, keys[:10]) == ["loaded"] * 3 + ["checksum"] + ["loaded"] * 6


def test_an_unreadable_state_block_makes_pages_suspect(shop, keys):
    store = shop.open()
    shop.put(store, keys[:4])
    damage(store, keys[1])
    store.close()
    paths_of(store).state.write_bytes(b"x" * 4096)
    store = shop.open()
    assert shop.get(store, keys[:4]) == ["loaded", "checksum", "loaded", "loaded"]
