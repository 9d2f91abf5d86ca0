"""What this version writes is what the golden stores hold, to the byte."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hicache_tier_storage.record import RECORD_DTYPE, as_words, checksum_seed, key_field, new_records, seal
from hicache_tier_storage.slab import SlabShape
from hicache_tier_storage.state import StateBlock


def contained(old, new):
    """Whether every field of `old` is in `new` with the same value; fields may only be added."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(name in new and contained(old[name], new[name]) for name in old)
    return old == new


@pytest.mark.parametrize("version", [1, 2])
def test_stores_made_now_are_the_golden_ones(maker, tmp_path, version):
    stores = maker.HERE / f"v{version}"
    maker.make_all(tmp_path, version)
    old = sorted(path.relative_to(stores) for path in stores.rglob("*") if path.is_file())
    new = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert new == old
    for path in old:
        a, b = (stores / path).read_bytes(), (tmp_path / path).read_bytes()
        if path.name == "zarr.json":
            assert contained(json.loads(a), json.loads(b)), path
        else:
            assert a == b, path


def test_golden_stores_are_small(maker):
    sizes = [path.stat().st_size for path in maker.HERE.glob("v*/**/*") if path.is_file()]
    assert sum(sizes) < 500_000


@pytest.fixture
def record():
    records = new_records(1)
    records["state"], records["algorithm"], records["key_nbytes"] = 2, 2, 5
    records["generation"], records["key"] = 6, key_field([b"abcde"])
    records["sequence"], records["checksum"] = 0x0102030405060708, 0x1112131415161718
    records["valid_nbytes"], records["epoch"], records["created_ns"] = 0x21222324, 3, 0x3132333435363738
    records["parent"], records["tokens"], records["flags"] = 0x4142434445464748, 16, 3
    records["access_s"] = 0x5152535455565758
    seal(records)
    return records


def test_record_known_answer(record, reader):
    raw = record.tobytes()
    assert len(raw) == RECORD_DTYPE.itemsize == 128
    assert raw[4:].hex() == (
        "010202050600000000000000"
        "6162636465000000000000000000000000000000000000000000000000000000"
        "08070605040302011817161514131211"
        "24232221030000003837363534333231"
        "48474645444342411000000003000000"
        "5857565554535251" + "00" * 24
    )
    assert int.from_bytes(raw[:4], "little") == reader.crc32c(raw[4:])
    assert as_words(record).tobytes() == raw


def test_state_block_known_answer(reader):
    block = StateBlock(bytes(range(16)), bytes(range(16, 32)), 77, 5, True, 9, 4, 4096, 2048, 64)
    raw = block.pack()
    assert raw[:12].hex() == "484354535441544501000000"
    assert raw[16:104].hex() == (
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        "4d00000005000000" "0100000000000000"
        "0900000000000000" "0400000000000000" "0010000000000000" "0008000000000000" "4000000000000000"
    )  # fmt: skip
    assert int.from_bytes(raw[12:16], "little") == reader.crc32c(raw[16:512])
    assert raw[104:] == bytes(4096 - 104)
    assert StateBlock.unpack(raw, "here") == block


def test_slab_tail_known_answer(reader):
    tail = SlabShape(5000, 8192, 2).tail()
    assert tail[:-4] == np.array([[0, 5000], [8192, 5000]], "<u8").tobytes()
    assert int.from_bytes(tail[-4:], "little") == reader.crc32c(tail[:-4])


def test_checksum_seed_known_answer():
    assert checksum_seed(b"abcde") == 0x1E4BE147FC308350
