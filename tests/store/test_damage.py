"""Damage of every kind costs the pages it hit, with a reason, until the next put repairs them."""

from __future__ import annotations

import os
import shutil
import time

import numpy as np
import pytest
import zarr

from hicache_tier.errors import StoreError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import PAGE_NBYTES, StoreRig, paths_of, slab_of, slot_of, tree, writer_of
from hicache_tier_storage.record import RECORD_NBYTES


def rewrite(path, offset, change):
    """Change bytes of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(PAGE_NBYTES)
        file.seek(offset)
        file.write(change(old))


def place(store, key):
    number, slot = slot_of(store, key)
    return slab_of(store, number), slot * PAGE_NBYTES


BYTE_FAULTS = {
    "bit": lambda old: bytes([old[0] ^ 0x10]) + old[1:],
    "last_bit": lambda old: old[:-1] + bytes([old[-1] ^ 1]),
    "block_zeroed": lambda old: bytes(4096) + old[4096:],
    "all_zero": lambda old: bytes(len(old)),
    "shifted": lambda old: old[1:] + b"\0",
}


@pytest.mark.parametrize("verify", ["always", "suspect"])
@pytest.mark.parametrize("fault", BYTE_FAULTS)
def test_a_damaged_payload_is_a_miss_of_that_page_alone(shop, keys, fault, verify):
    store = shop.open(verify=verify)
    shop.put(store, keys[:20])
    rewrite(*place(store, keys[7]), BYTE_FAULTS[fault])
    if verify == "suspect":
        writer_of(store).suspect[:] = True
    assert shop.get(store, keys[:20]) == ["loaded"] * 7 + ["checksum"] + ["loaded"] * 12
    assert store.match_prefix(keys[:20]) == 7
    assert shop.get(store, keys[7:8]) == ["absent"]
    assert shop.put(store, keys[:20]) == ["already_stored"] * 7 + ["stored"] + ["already_stored"] * 12
    assert shop.get(store, keys[:20]) == ["loaded"] * 20


@pytest.mark.parametrize("what", ["payload", "record"])
def test_a_damaged_page_that_is_asked_for_twice(shop, keys, what):
    store = shop.open(verify="always")
    shop.put(store, keys[:3])
    if what == "payload":
        rewrite(*place(store, keys[1]), BYTE_FAULTS["bit"])
    else:
        number, slot = slot_of(store, keys[1])
        writer_of(store).tables.tables[number].words[slot, 7] ^= np.uint64(1)
    why = "checksum" if what == "payload" else "changed"
    assert shop.get(store, [keys[1], keys[0], keys[1]]) == [why, "loaded", why]
    assert shop.get(store, keys[:3]) == ["loaded", "absent", "loaded"]
    assert shop.put(store, keys[:3]).count("stored") == 1


def test_swapped_pages_are_caught(shop, keys):
    store = shop.open(verify="always")
    shop.put(store, keys[:4])
    (slab, first), (_, second) = place(store, keys[1]), place(store, keys[2])
    with slab.open("r+b") as file:
        whole = bytearray(file.read())
        a, b = whole[first : first + PAGE_NBYTES], whole[second : second + PAGE_NBYTES]
        whole[first : first + PAGE_NBYTES], whole[second : second + PAGE_NBYTES] = b, a
        file.seek(0)
        file.write(whole)
    assert shop.get(store, keys[:4]) == ["loaded", "checksum", "checksum", "loaded"]


@pytest.mark.parametrize("at", [4, 8, 16, 40, 48, 56, 64, 80, 96, 104, 127])
def test_a_damaged_record_is_a_miss_of_that_page_alone(shop, keys, at):
    store = shop.open()
    shop.put(store, keys[:10])
    number, slot = slot_of(store, keys[3])
    table = paths_of(store).table(number)
    with table.open("r+b") as file:
        file.seek(slot * RECORD_NBYTES + at)
        old = file.read(1)
        file.seek(slot * RECORD_NBYTES + at)
        file.write(bytes([old[0] ^ 0x02]))
    assert shop.get(store, keys[:10]) == ["loaded"] * 3 + ["changed"] + ["loaded"] * 6
    assert shop.put(store, keys[:10]).count("stored") == 1
    assert shop.get(store, keys[:10]) == ["loaded"] * 10


def test_a_damaged_record_is_not_made_whole_by_an_access_time_or_a_pin(shop, keys):
    store = shop.open()
    shop.put(store, keys[:4])
    number, slot = slot_of(store, keys[1])
    rewrite(paths_of(store).table(number), slot * RECORD_NBYTES + 56, lambda old: b"\1" + old[1:])
    store.pin(keys[:4])
    assert shop.get(store, keys[:4])[1] == "changed"


def test_swapped_records_are_caught(shop, keys):
    store = shop.open()
    shop.put(store, keys[:4])
    (number, first), (_, second) = slot_of(store, keys[1]), slot_of(store, keys[2])
    words = writer_of(store).tables.tables[number].words
    words[[first, second]] = words[[second, first]]
    assert shop.get(store, keys[:4]) == ["loaded", "changed", "changed", "loaded"]


@pytest.mark.parametrize("size", ["nothing", "one", "half", "one_less", "one_more"])
@pytest.mark.parametrize("when", ["open", "closed"])
def test_a_slab_of_the_wrong_size_is_dropped_and_the_rest_serves(shop, keys, size, when):
    store = shop.open()
    shop.put(store, keys[:60])
    slab = slab_of(store, 1)
    mine = {key for key in keys[:60] if slot_of(store, key)[0] == 1}
    whole = slab.stat().st_size
    if when == "closed":
        store.close()
    sizes = {"nothing": 0, "one": 1, "half": whole // 2, "one_less": whole - 1, "one_more": whole + 1}
    os.truncate(slab, sizes[size])
    if when == "closed":
        store = shop.open()
        expected = "absent"
    else:
        expected = "damaged"
    reasons = shop.get(store, keys[:60])
    for key, reason in zip(keys[:60], reasons, strict=True):
        assert reason.startswith(expected if key in mine else "loaded")
    assert any("bytes instead of" in line for line in store.stats()["damage"])
    assert shop.put(store, keys[:60]).count("stored") == len(mine)
    assert shop.get(store, keys[:60]) == ["loaded"] * 60
    store.close()
    store = shop.open()
    assert shop.get(store, keys[:60]) == ["loaded"] * 60
    assert not store.stats()["damage"]


@pytest.mark.parametrize("what", ["slab", "table"])
@pytest.mark.parametrize("how", ["unlinked", "renamed_over", "cut", "emptied", "symlink", "directory"])
@pytest.mark.parametrize("verb", ["get", "put", "match", "pin", "close"])
def test_files_changed_under_an_open_store(memory_path, keys, what, how, verb):
    rig = StoreRig(memory_path / "root")
    store = rig.open()
    rig.put(store, keys[:60])
    path = slab_of(store, 0) if what == "slab" else paths_of(store).table(0)
    if how in {"cut", "emptied"}:
        os.truncate(path, 0 if how == "emptied" else path.stat().st_size // 2)
    elif how == "unlinked":
        path.unlink()
    else:
        copy = path.with_name("other")
        copy.write_bytes(path.read_bytes())
        if how == "renamed_over":
            copy.replace(path)
        else:
            path.unlink()
            if how == "symlink":
                path.symlink_to(copy)
            else:
                path.mkdir()
    time.sleep(0.05)
    if verb == "get":
        reasons = rig.get(store, keys[:60])
        assert reasons.count("loaded") >= 44
    elif verb == "put":
        rig.put(store, keys[60:300])
    elif verb == "match":
        store.match_prefix(keys[:60])
    elif verb == "pin":
        store.pin(keys[:60])
        store.unpin(keys[:60])
    if verb != "close":
        rig.put(store, keys[:60])
        rig.get(store, keys[:60])
        rig.put(store, keys[:60])
        assert rig.get(store, keys[:60]).count("loaded") >= 44
    store.close()
    again = rig.open()
    assert rig.get(again, keys[:60]).count("loaded") >= 44 - 16 * (how == "directory")
    rig.close()


@pytest.mark.parametrize("part", ["journal", "c.0"])
@pytest.mark.parametrize("how", ["cut", "unlinked", "garbage"])
def test_the_journal_and_the_state_may_be_damaged_at_any_time(shop, keys, part, how):
    store, other = shop.open(), shop.open()
    shop.put(store, keys[:10])
    time.sleep(0.1)
    assert shop.get(other, keys[:10]) == ["loaded"] * 10
    path = paths_of(store).state.with_name(part)
    if how == "cut":
        os.truncate(path, 100)
    elif how == "unlinked":
        path.unlink()
    else:
        path.write_bytes(b"\xfb" * path.stat().st_size)
    for number in range(3):
        shop.put(store, keys[20 + number : 21 + number])
        store.delete(keys[number : number + 1])
        time.sleep(0.12)
        shop.get(other, keys[:30])
    fresh = [key for key in keys[:30] if key in store]
    assert shop.get(store, fresh) == ["loaded"] * len(fresh)
    assert shop.put(other, keys[30:35]) == ["stored"] * 5
    store.close()
    again = shop.open()
    assert shop.get(again, fresh) == ["loaded"] * len(fresh)
    if how != "garbage" or part != "journal":
        assert other.contains(fresh) == [True] * len(fresh)


def test_a_bad_index_drops_the_slab_at_open(shop, keys):
    store = shop.open()
    shop.put(store, keys[:60])
    slab, size = slab_of(store, 2), slab_of(store, 2).stat().st_size
    store.close()
    rewrite(slab, size - 4, lambda old: bytes([old[0] ^ 1]) + old[1:])
    store = shop.open()
    assert shop.get(store, keys[:60]).count("loaded") == 44
    assert any("damaged index" in line for line in store.stats()["damage"])
    assert shop.put(store, keys[:60]).count("stored") == 16


@pytest.mark.parametrize("leftover", ["slab", "table"])
def test_half_a_slab_is_taken_away_at_open(shop, keys, leftover):
    store = shop.open()
    shop.put(store, keys[:60])
    (paths_of(store).table(1) if leftover == "slab" else slab_of(store, 1)).unlink()
    pages = paths_of(store).pages
    store.close()
    store = shop.open()
    assert shop.get(store, keys[:60]).count("loaded") == 44
    assert shop.put(store, keys).count("stored") >= 16
    slabs = {path.name.split(".")[1] for path in pages.glob("c.*")}
    assert slabs == {str(number) for number in writer_of(store).slabs}


def test_a_foreign_zarr_writer_rewrites_a_slab(shop, keys):
    store = shop.open()
    shop.put(store, keys[:60])
    number, slot = slot_of(store, keys[20])
    group = zarr.open_group(paths_of(store).root, mode="r+")
    group["pages"][number * 16 + slot] = 7  # zarr writes the whole shard anew and renames it into place
    reasons = shop.get(store, keys[:60])
    assert [reason for reason in reasons if reason != "loaded"]
    assert all(
        reason.startswith("damaged" if slot_of_before == number else "loaded")
        for reason, slot_of_before in zip(reasons, [at // 16 for at in range(60)], strict=True)
    )
    assert any("replaced" in line for line in store.stats()["damage"])
    assert shop.put(store, keys[:60]).count("stored") == 16
    assert shop.get(store, keys[:60]) == ["loaded"] * 60


def test_an_all_zero_page_is_a_hit(shop):
    from hicache_tier.testing.array_pool import ArrayPool, read_page, write_page
    from hicache_tier.testing.store_rig import GEOMETRY

    store = shop.open(verify="always")
    host = ArrayPool(GEOMETRY, "page_first", 2)
    assert store.put([b"zero"], host, [0]) == [1]
    write_page(host, 1, b"\1" * PAGE_NBYTES)
    assert store.get([b"zero"], host, [1]) == [1]
    assert read_page(host, 1) == bytes(PAGE_NBYTES)


def test_access_denied_when_opening_is_an_error_and_nothing_is_removed(shop, keys, monkeypatch):
    store = shop.open()
    shop.put(store, keys[:20])
    slab = slab_of(store)
    store.close()
    before = {name: facts[1] for name, facts in tree(shop.root).items()}
    real = os.open

    def denied(path, *arguments, **options):
        if path == slab.name:
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        with pytest.raises(StoreError, match="denied"):
            shop.open()
    assert {name: facts[1] for name, facts in tree(shop.root).items()} == before
    assert shop.get(shop.open(), keys[:20]) == ["loaded"] * 20


def test_access_denied_when_reading_is_told_apart_from_a_miss(shop, keys, monkeypatch):
    store = shop.open()
    shop.put(store, keys[:4])
    store.close()
    store = shop.open()
    slab = slab_of(store)
    store._cache.close()
    store._cache._closed = False
    real = os.open

    def denied(path, *arguments, **options):
        if path == slab.name:
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        assert shop.get(store, keys[:5]) == ["access_denied"] * 4 + ["absent"]
    assert shop.get(store, keys[:4]) == ["loaded"] * 4


@pytest.mark.parametrize("step", ["generation", "words", "crc"])
def test_a_kill_while_an_access_time_is_published_loses_nothing(shop, keys, step):
    store = shop.open()
    shop.put(store, keys[:10])
    number, slot = slot_of(store, keys[4])
    words = writer_of(store).tables.tables[number].words
    words[slot, 1] |= np.uint64(1)
    if step in {"words", "crc"}:
        words[slot, 12] += np.uint64(100)
    if step == "crc":
        words[slot, 0] ^= np.uint64(0x12345678)
    writer_of(store).abandon()
    store._core.writer = store._putter = store._keeper = None
    again = shop.open()
    assert shop.get(again, keys[:10]) == ["loaded"] * 10


def test_a_kill_while_a_page_is_overwritten_keeps_no_torn_page(shop, keys):
    store = shop.open()
    shop.put(store, keys[:10])
    number, slot = slot_of(store, keys[4])
    writer_of(store).tables.tables[number].words[slot, 1] |= np.uint64(1)
    rewrite(*place(store, keys[4]), lambda old: b"new" + old[3:])
    writer_of(store).abandon()
    store._core.writer = store._putter = store._keeper = None
    assert shop.get(shop.open(), keys[:10]) == ["loaded"] * 4 + ["absent"] + ["loaded"] * 5


def test_damage_in_another_writers_partition_is_a_miss_and_is_repaired_here(shop, keys):
    first, second = shop.open(), shop.open(verify="always")
    shop.put(first, keys[:20])
    time.sleep(0.1)
    assert shop.get(second, keys[:20]) == ["loaded"] * 20
    rewrite(*place(first, keys[5]), BYTE_FAULTS["bit"])
    assert shop.get(second, keys[:20])[5] == "checksum"
    assert shop.put(second, keys[:20])[5] == "stored"
    assert shop.get(second, keys[:20]) == ["loaded"] * 20
    slab_of(first, 0).unlink()
    reasons = shop.get(second, keys[:20])
    assert {reason.partition(":")[0] for reason in reasons} <= {"loaded", "damaged"}
    assert reasons[5] == "loaded"


def test_the_whole_partition_vanishes_while_others_read_it(shop, keys):
    first, second = shop.open(), shop.open()
    shop.put(first, keys[:20])
    time.sleep(0.1)
    assert shop.get(second, keys[:20]) == ["loaded"] * 20
    shutil.rmtree(paths_of(first).root.parent)
    shop.get(second, keys[:20])
    time.sleep(0.1)
    shop.get(second, keys[:20])
    assert not any(second.contains(keys[:20]))
    assert set(shop.put(second, keys[:20])) == {"stored"}
    assert not any(reason == "loaded" for reason in shop.get(first, keys_of("none", 2)))


@pytest.mark.parametrize("what", ["root", "namespace"])
def test_a_store_that_was_removed_says_so_once_and_that_it_must_be_opened_again(shop, keys, what, caplog):
    store = shop.open()
    assert shop.put(store, keys[:20]) == ["stored"] * 20
    shutil.rmtree(shop.root if what == "root" else shop.root / store.identity.namespace)
    assert set(shop.put(store, keys[20:24])) == {"store_gone"}
    assert set(shop.put(store, keys[:4]) + shop.put(store, keys[24:28])) == {"store_gone"}
    told = store.stats()
    assert told["put"]["store_gone"] == 12
    assert sum("opened again" in line for line in told["damage"]) == 1
    assert sum("opened again" in record.message for record in caplog.records) == 1
    again = shop.open()
    assert shop.put(again, keys[:40]) == ["stored"] * 40
    assert shop.get(again, keys[:40]) == ["loaded"] * 40


def test_a_store_made_anew_in_the_place_of_one_in_use_is_not_written_over(shop, keys):
    first = shop.open()
    assert shop.put(first, keys[:20]) == ["stored"] * 20
    shutil.rmtree(shop.root)
    second = shop.open()
    assert paths_of(second) == paths_of(first)
    assert shop.put(second, keys[20:40]) == ["stored"] * 20
    state = paths_of(second).state.read_bytes()
    for _ in range(2):
        shop.put(first, keys[40:60])
    assert set(shop.put(first, keys[40:60])) == {"store_gone"}
    assert not first.close().synced
    assert shop.get(second, keys[20:40]) == ["loaded"] * 20
    assert shop.put(second, keys[60:64]) == ["stored"] * 4
    assert not second.stats()["damage"]
    assert paths_of(second).state.read_bytes() == state


def test_foreign_files_are_left_alone(shop, keys):
    store = shop.open()
    shop.put(store, keys[:20])
    paths = paths_of(store)
    strange = [
        shop.root / "README",
        paths.pages / "c.x.0",
        paths.pages / "notes.tmp.txt",
        paths.slots / "c.1",
        paths.slots / "backup",
        paths.root.parent / "mine",
    ]
    for path in strange:
        path.write_text("mine")
    assert store.clear() == 20
    store.close()
    store = shop.open()
    shop.put(store, keys[:20])
    assert store.clear() == 20
    store.close()
    assert all(path.read_text() == "mine" for path in strange)


def test_a_file_in_the_place_of_the_root_is_misses_and_refusals(shop, keys):
    store = shop.open()
    assert shop.put(store, keys[:4]) == ["stored"] * 4
    shutil.rmtree(store.root)
    store.root.write_text("not a folder")
    assert shop.get(store, keys[:4]) == ["store_gone"] * 4
    assert set(shop.put(store, keys[:4])) == {"store_gone"}
    assert store.match_prefix(keys[:4]) == 0
    report = store.close()
    assert not report.synced
    assert not report.abandoned_calls
