"""What a file says of its own size is no memory that is taken: hostile files, and what they cost."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zipfile
from contextlib import contextmanager

import google_crc32c
import numpy as np
import pytest
from click.testing import CliRunner

from hicache_tier.bench.traces import TraceError, read_trace
from hicache_tier.cli import main
from hicache_tier.errors import InvalidArgumentError, StoreError
from hicache_tier.testing.store_rig import paths_of, slab_of, writer_of
from hicache_tier_storage import EncryptionKey
from hicache_tier_storage.archive.errors import ArchiveError
from hicache_tier_storage.archive.prompts import read_prompts
from hicache_tier_storage.archive.reader import open_archive
from hicache_tier_storage.dataset import open_dataset
from hicache_tier_storage.inspection import inspect_root, verify_root
from hicache_tier_storage.partition_facts import PartitionFacts
from hicache_tier_storage.record import COMMITTED, as_words, new_records, seal
from hicache_tier_storage.slab import create_slab
from hicache_tier_storage.table import table_nbytes

MOST_NBYTES = 48 << 20
HUGE = 1 << 40


@contextmanager
def little_memory(most=MOST_NBYTES):
    """Fail where a block takes more memory than this at once."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most, peak


@pytest.fixture
def stored(shop, keys):
    store = shop.open()
    assert set(shop.put(store, keys[:32])) == {"stored"}
    shop.paths, shop.axes, shop.first_slab = paths_of(store), writer_of(store).facts.page_axes, slab_of(store)
    store.close()
    return shop


def everything(shop, keys, tmp_path):
    """Let all that reads a store read it; return how many pages a reader and a writer see."""
    with little_memory():
        inspect_root(shop.root)
        verify_root(shop.root)
        reader = shop.open(read_only=True)
        seen = reader.match_prefix(keys)
        shop.get(reader, keys)
        CliRunner().invoke(main, ["export", str(shop.root), str(tmp_path / "archive")])
        writer = shop.open()
        kept = writer.match_prefix(keys)
        shop.put(writer, keys)
        assert set(shop.get(writer, keys)) == {"loaded"}
    return seen, kept


def grow(path, nbytes=HUGE):
    with path.open("r+b") as file:
        file.truncate(nbytes)


@pytest.mark.parametrize(
    ("name", "seen", "kept"),
    [
        ("zarr.json", 0, 32),
        ("pages/zarr.json", 32, 32),
        ("slots/zarr.json", 32, 32),
        ("state/c.0", 32, 32),
        ("state/journal", 32, 32),
        ("slab", 0, 0),
        ("table", 0, 0),
        ("../../zarr.json", 32, 32),
    ],
)
def test_a_file_of_a_store_that_is_a_terabyte_long(stored, keys, tmp_path, name, seen, kept):
    plain = {"slab": stored.first_slab, "table": stored.paths.table(0)}
    grow(plain.get(name) or (stored.paths.root / name).resolve())
    assert everything(stored, keys, tmp_path) == (seen, kept)


@pytest.mark.parametrize(
    "change",
    [
        {"slots_per_slab": 1 << 40},
        {"slots_per_slab": 1 << 20},
        {"stride": 1 << 50},
        {"page_axes": 1 << 30},
        {"capacity_bytes": 1 << 90},
        {"geometry": {"num_layers": 1 << 40}},
        {"geometry": {"page_tokens": 1 << 60, "rows": 1 << 60}},
    ],
    ids=str,
)
def test_a_partition_that_says_it_is_larger_than_any(stored, keys, tmp_path, change):
    path = stored.paths.root / "zarr.json"
    document = json.loads(path.read_text())
    told = document["attributes"]["hicache_tier"]
    for name, value in change.items():
        told[name] = told[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(document))
    with little_memory(1 << 20), pytest.raises(StoreError) if "capacity_bytes" not in change else little():
        PartitionFacts.read(stored.paths)
    assert everything(stored, keys, tmp_path)[1] == 32  # its state block tells the truth


@contextmanager
def little():
    yield


def test_a_state_block_and_a_group_that_agree_on_a_lie(stored, keys, tmp_path):
    raw = bytearray(stored.paths.state.read_bytes())
    raw[72:80] = struct.pack("<Q", 1 << 45)
    raw[12:16] = google_crc32c.value(bytes(raw[16:512])).to_bytes(4, "little")
    stored.paths.state.write_bytes(raw)
    everything(stored, keys, tmp_path)


@pytest.mark.parametrize("number", [1 << 24, 999_999_999, 10**9, 10**30])
def test_a_slab_numbered_far_beyond_all_others(stored, keys, tmp_path, number):
    shape = PartitionFacts.read(stored.paths).shape
    page = new_records(1)
    page["state"], page["valid_nbytes"], page["key_nbytes"] = COMMITTED, shape.page_nbytes, 32
    page["key"], page["generation"] = np.frombuffer(keys[40], np.uint8), 2
    seal(page)
    table = as_words(page).tobytes().ljust(table_nbytes(shape.slots), b"\0")
    stored.paths.table(number).write_bytes(table)
    create_slab(stored.paths.slab(number, stored.axes), shape)
    seen, kept = everything(stored, keys, tmp_path)
    assert (seen, kept) == (32, 32)


def test_a_journal_that_names_slots_there_cannot_be(stored, keys):
    store = stored.open()
    reader = stored.open(read_only=True)
    assert reader.match_prefix(keys) == 32
    slots = np.random.default_rng(5).integers(0, 1 << 32, 30_000, dtype=np.uint32)
    with paths_of(store).journal.open("r+b") as file:
        file.seek(8)
        count = int.from_bytes(file.read(8), "little")
        at = count % 65536
        ring = np.zeros(65536, "<u4")
        ring[(at + np.arange(len(slots))) % 65536] = slots
        file.seek(4096)
        file.write(ring.tobytes())
        file.seek(8)
        file.write((count + len(slots)).to_bytes(8, "little"))
    with little_memory():
        assert set(stored.get(reader, keys[:32])) == {"loaded"}
    assert reader.match_prefix(keys) == 32


def test_a_dataset_of_more_slots_than_there_can_be(stored):
    path = stored.paths.pages / "zarr.json"
    document = json.loads(path.read_text())
    document["shape"][0] = 1 << 50
    path.write_text(json.dumps(document))
    with little_memory(), pytest.raises(StoreError, match="more than there can be"):
        open_dataset(stored.root)


def test_json_that_is_nested_or_numeric_beyond_reason(stored, keys, tmp_path):
    for text in ("[" * 100_000, '{"attributes": ' + "9" * 100_000 + "}"):
        for path in (stored.paths.root / "zarr.json", stored.paths.root.parents[1] / "zarr.json"):
            path.write_text(text)
            everything(stored, keys, tmp_path)


# -- archives --------------------------------------------------------------------------------------------


@pytest.fixture
def archive(stored, tmp_path):
    result = CliRunner().invoke(main, ["export", str(stored.root), str(tmp_path / "made")])
    assert result.exit_code == 0, result.output
    return tmp_path / "made"


def change_manifest(archive, change):
    path = archive / "zarr.json"
    document = json.loads(path.read_text())
    change(document["attributes"]["hicache_tier"])
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["parts"][0].update(pages=1 << 40),
        lambda told: told["parts"][0].update(shard_pages=1 << 20),
        lambda told: told["parts"][0]["geometry"].update(num_layers=1 << 40),
        lambda told: told["parts"][0].update(page_nbytes=1 << 60),
        lambda told: told["parts"][0]["geometry"].update(page_tokens=1 << 40),
        lambda told: told.update(parts=told["parts"] * 1000),
    ],
)
def test_a_manifest_that_promises_too_much(archive, tmp_path, change):
    change_manifest(archive, change)
    with little_memory():
        result = CliRunner().invoke(main, ["import", str(archive), str(tmp_path / "into"), "--json"])
    assert result.exit_code in {1, 2}
    assert not list((tmp_path / "into").rglob("c.0.0*"))


def test_files_of_an_archive_that_are_a_terabyte_long(archive, tmp_path):
    for path in sorted(archive.rglob("*")):
        if path.is_file():
            size = path.stat().st_size
            grow(path)
            with little_memory():
                result = CliRunner().invoke(main, ["import", str(archive), str(tmp_path / "into"), "--json"])
            assert result.exit_code in {0, 1, 2}
            grow(path, size)


@pytest.mark.parametrize("field", ["count", "size", "offset", "member"])
def test_a_zip_whose_directory_lies(archive, tmp_path, field):
    path = tmp_path / "archive.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as packed:
        for file in sorted(archive.rglob("*")):
            if file.is_file():
                packed.write(file, file.relative_to(archive))
    raw = bytearray(path.read_bytes())
    end, first = raw.rfind(b"PK\x05\x06"), raw.find(b"PK\x01\x02")
    at, value = {
        "count": (end + 10, b"\xfe\xff"),
        "size": (end + 12, b"\xfe\xff\xff\x7f"),
        "offset": (end + 16, b"\xfe\xff\xff\x7f"),
        "member": (first + 20, b"\xfe\xff\xff\x7f" * 2),
    }[field]
    raw[at : at + len(value)] = value
    path.write_bytes(raw)
    with little_memory(), pytest.raises(ArchiveError):
        open_archive(path)


# -- other files -----------------------------------------------------------------------------------------


def npy(header):
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.npy", npy("{'descr': '<u4', 'fortran_order': False, 'shape': (1099511627776,), }")),
        ("b.npy", npy("{'descr': '<u4', 'fortran_order': False, 'shape': (4611686018427387904, 4), }")),
        ("c.npy", npy("{'descr': '|O', 'fortran_order': False, 'shape': (3,), }") + b"\x80\x04."),
        ("d.npy", npy("{'descr': '<U1000000000', 'fortran_order': False, 'shape': (2,), }")),
        ("e.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{"),
        ("f.npy", b"PK\x05\x06" + bytes(18)),
        ("g.npy", b""),
        ("a.txt", b"[" * 200_000),
        ("b.txt", b'{"tokens": 7}'),
        ("c.txt", b"[1, 2, " + b"9" * 5000 + b"]"),
        ("d.txt", b"\xff\xfe1 2 3"),
        ("e.txt", b'{"tokens": [[1, 2]]}'),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_files_of_tokens(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with little_memory(), pytest.raises(InvalidArgumentError):
        read_prompts(path)


def test_lines_without_an_end(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(100 << 20)  # zeros, and no line's end
    with little_memory(400 << 20):
        with pytest.raises(TraceError, match="characters"):
            read_trace(path)
        with pytest.raises(InvalidArgumentError, match="characters"):
            read_prompts(path)
    with little_memory():
        result = CliRunner().invoke(
            main, ["export", str(tmp_path), str(tmp_path / "to"), "--keys", str(path)]
        )
        assert "characters" in result.output
        grow(path)
        with pytest.raises(InvalidArgumentError, match="holds no key"):
            EncryptionKey.from_file(path)
        with pytest.raises(InvalidArgumentError, match="more than"):
            read_prompts(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 1, "input_length": ' + "9" * 4000 + ', "output_length": 1, "hash_ids": [1]}',
        "[" * 50_000,
    ],
)
def test_requests_of_a_trace_that_cannot_be(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with little_memory(), pytest.raises(TraceError, match="line 1"):
        read_trace(path)
