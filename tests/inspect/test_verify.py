"""`verify_root`: finds every kind of damage, counts what it costs, blames nobody who is merely busy."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest

from hicache_tier.errors import NotAStoreError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier_storage.inspection import verify_root
from hicache_tier_storage.record import RECORD_DTYPE, as_records, seal


def reasons(told):
    (partition,) = told["partitions"]
    return {detail["slot"]: detail["reason"] for detail in partition["details"]}


def reseal(path, at, **fields):
    """Change fields of one record and give it a good CRC again."""
    records = np.frombuffer(bytearray(path.read_bytes()), RECORD_DTYPE)
    for name, value in fields.items():
        records[name][at] = value
    one = records[at : at + 1].copy()
    seal(one)
    records[at] = one[0]
    path.write_bytes(records.tobytes())


def test_healthy_store(stored, tools):
    calls = []
    told = verify_root(stored.root, progress=lambda done, total: calls.append((done, total)))
    json.dumps(told)
    assert (told["pages"], told["damaged"], told["prefix_loss"], told["details"]) == (20, 0, 0, [])
    assert (told["unverifiable"], told["unfinished"], told["changed"]) == (0, 0, 0)
    assert calls[0] == (1, 20)
    assert calls[-1] == (20, 20)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_nothing_is_written(stored, tools):
    tools.patch(stored.slab(0), 5, lambda byte: byte ^ 1)
    before = tools.snapshot(stored.root)
    assert verify_root(stored.root)["damaged"] == 1
    assert tools.snapshot(stored.root) == before


def test_one_flipped_bit(stored, tools):
    tools.patch(stored.slab(0), 3 * tools.stride + 17, lambda byte: byte ^ 0x40)
    told = verify_root(stored.root)
    (partition,) = told["partitions"]
    assert partition["details"] == [
        {"key": stored.keys[3].hex(), "slot": 3, "reason": "the payload's checksum is wrong"}
    ]
    assert (told["damaged"], told["pages"]) == (1, 20)
    assert told["prefix_loss"] == 16, "pages 4 to 19 follow page 3"
    assert told["details"][0]["what"] == "the payload's checksum is wrong"


def test_two_pages_swapped(stored, tools):
    slab, stride = stored.slab(0), tools.stride
    raw = bytearray(slab.read_bytes())
    raw[stride : 2 * stride], raw[5 * stride : 6 * stride] = (
        raw[5 * stride : 6 * stride],
        raw[stride : 2 * stride],
    )
    slab.write_bytes(raw)
    assert set(reasons(verify_root(stored.root))) == {1, 5}


def test_block_of_zeros(stored, tools):
    raw = bytearray(stored.slab(2).read_bytes())
    raw[tools.stride : tools.stride + 4096] = bytes(4096)
    stored.slab(2).write_bytes(raw)
    assert set(reasons(verify_root(stored.root))) == {17}


def test_record_bit_flips_anywhere_are_found(stored, tools):
    table = stored.table(0).read_bytes()
    for at in (0, 4, 5, 6, 7, 8, 15, 16, 47, 48, 56, 64, 68, 72, 80, 88, 92, 96, 104, 127):
        raw = bytearray(table)
        raw[2 * 128 + at] ^= 2
        stored.table(0).write_bytes(raw)
        told = verify_root(stored.root)
        assert told["damaged"] == 1, at
        assert set(reasons(told)) == {2}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"version": 9}, "another version"),
        ({"state": 7}, "no known state"),
        ({"key_nbytes": 0}, "key's length"),
        ({"key_nbytes": 33}, "key's length"),
        ({"valid_nbytes": 1}, "another length"),
        ({"algorithm": 5}, "unknown kind"),
        ({"checksum": 1}, "checksum is wrong"),
        ({"key": 0}, "checksum is wrong"),
    ],
)
def test_records_that_cannot_be(stored, fields, what):
    reseal(stored.table(1), 4, **fields)
    told = verify_root(stored.root)
    assert told["damaged"] == 1
    assert what in reasons(told)[12]


def test_states_that_are_no_pages(stored):
    reseal(stored.table(1), 4, state=3)
    reseal(stored.table(1), 5, state=1)
    reseal(stored.table(1), 6, generation=7)
    told = verify_root(stored.root)
    assert (told["damaged"], told["pages"], told["unfinished"]) == (0, 17, 2)


@pytest.mark.parametrize("nbytes", [0, 1, 3 * 4096 + 5, -1, 1])
def test_cut_or_grown_slab(stored, nbytes):
    size = stored.slab(1).stat().st_size
    os.truncate(stored.slab(1), nbytes if nbytes >= 0 and nbytes < 2 else size + nbytes)
    told = verify_root(stored.root)
    assert told["damaged"] == 8
    assert told["prefix_loss"] == 4
    assert len(told["partitions"][0]["damage"]) == 1


def test_slab_gone(stored):
    stored.slab(1).unlink()
    told = verify_root(stored.root)
    assert (told["damaged"], told["pages"], told["prefix_loss"]) == (8, 20, 4)


def test_bad_index(stored, tools):
    tools.patch(stored.slab(0), -1, lambda byte: byte ^ 1)
    told = verify_root(stored.root)
    assert told["damaged"] == 8
    assert "damaged index" in reasons(told)[0]


def test_cut_table(stored):
    os.truncate(stored.table(0), 3 * 128 + 64)
    told = verify_root(stored.root)
    assert told["damaged"] == 3, "those whose records are whole"
    assert "instead of 1024" in reasons(told)[0]


def test_empty_table_and_missing_table_count_as_one(stored):
    os.truncate(stored.table(0), 0)
    stored.table(1).unlink()
    told = verify_root(stored.root)
    assert (told["damaged"], told["pages"]) == (2, 4)
    assert len(told["partitions"][0]["damage"]) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("state/c.0", None),
        ("state/c.0", "short"),
        ("zarr.json", None),
        ("pages/zarr.json", None),
        ("pages/zarr.json", "[]"),
        ("slots/zarr.json", "{}"),
        ("state/zarr.json", "\x00"),
    ],
)
def test_damaged_documents(stored, name, text):
    path = stored.partition / name
    path.unlink() if text is None else path.write_text(text)
    told = verify_root(stored.root)
    assert told["damaged"] == 1
    assert told["details"]


def test_document_of_another_geometry(stored):
    path = stored.partition / "pages" / "zarr.json"
    data = json.loads(path.read_text())
    data["shape"][2] += 1
    path.write_text(json.dumps(data))
    told = verify_root(stored.root)
    assert told["damaged"] == 1
    assert "pages/zarr.json does not describe the files: shape" in told["details"][0]["what"]


def test_foreign_files_are_no_damage(stored):
    (stored.partition / "pages" / "c.0.backup").write_text("mine")
    (stored.root / "notes.txt").write_text("mine")
    assert verify_root(stored.root)["damaged"] == 0


def test_pages_without_a_checksum_are_unverifiable(tmp_path, tools):
    root = tmp_path / "store"
    with tools.open_store(root, checksums=False) as store:
        tools.put_chain(store, keys_of("a", 5))
    told = verify_root(root)
    assert (told["pages"], told["unverifiable"], told["damaged"]) == (5, 5, 0)


def test_prefixes_run_over_the_writers_of_a_rank(tmp_path, tools):
    """Prefixes run over all writers of a rank: here the second holds the first page."""
    root = tmp_path / "store"
    chain = keys_of("chain", 6)
    with tools.open_store(root) as one:
        tools.put_chain(one, chain)
    (slab,) = root.glob("*/*-w0/kv/pages/c.0.0*")
    with tools.open_store(root) as one, tools.open_store(root) as two:
        one.delete(chain[:1])
        tools.until(lambda: chain[0] not in two)
        tools.put_chain(two, chain[:1])
    assert verify_root(root)["prefix_loss"] == 0
    tools.patch(slab, 3 * tools.stride, lambda byte: byte ^ 1)
    told = verify_root(root)
    assert (told["damaged"], told["prefix_loss"]) == (1, 2)


def test_while_another_process_puts_and_evicts(tmp_path, child):
    root = tmp_path / "store"
    process = child(root)
    deadline = time.monotonic() + 1.5
    looks = 0
    while time.monotonic() < deadline:
        told = verify_root(root)
        assert told["damaged"] == 0, told["details"]
        looks += 1
    assert looks >= 2
    assert process.poll() is None


def test_after_sigkill_nothing_is_damaged(tmp_path, child):
    root = tmp_path / "store"
    for _ in range(3):
        process = child(root)
        process.kill()
        process.wait()
        told = verify_root(root)
        assert told["damaged"] == 0, told["details"]
        assert told["pages"] >= 32


def test_details_are_bounded(stored, tools, monkeypatch):
    monkeypatch.setattr("hicache_tier_storage.audit._MAX_DETAILS", 5)
    os.truncate(stored.slab(0), 0)
    (partition,) = verify_root(stored.root)["partitions"]
    assert (len(partition["details"]), partition["details_omitted"], partition["damaged"]) == (5, 3, 8)


def test_damaged_namespace_group_counts(stored):
    (stored.partition.parent.parent / "zarr.json").write_text("{")
    told = verify_root(stored.root)
    assert (told["damaged"], told["pages"]) == (1, 20)


def test_no_store(tmp_path):
    with pytest.raises(NotAStoreError):
        verify_root(tmp_path)


def test_record_views_agree(stored):
    words = np.fromfile(stored.table(0), np.uint64).reshape(-1, 16)
    assert as_records(words)["key_nbytes"].tolist() == [32] * 8
