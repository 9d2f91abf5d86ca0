"""Readers of one file or one block each."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zipfile
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from hicache_tier.bench.traces import TraceError, read_trace
from hicache_tier.errors import FormatVersionError, InvalidArgumentError, StoreError
from hicache_tier.geometry import KVGeometry
from hicache_tier.layout import Layout
from hicache_tier_storage import EncryptionKey
from hicache_tier_storage.access import Access
from hicache_tier_storage.archive.codecs import Codec, PageDamagedError
from hicache_tier_storage.archive.documents import PartName
from hicache_tier_storage.archive.errors import ArchiveError
from hicache_tier_storage.archive.manifest import PartFacts, manifest_document, parse_manifest
from hicache_tier_storage.archive.prompts import read_prompts
from hicache_tier_storage.archive.reader import ArchivePart
from hicache_tier_storage.archive.shard import pack_index
from hicache_tier_storage.archive.source import UnreadableError
from hicache_tier_storage.archive.zip_reader import data_offset, read_directory
from hicache_tier_storage.census import SlotState, judge
from hicache_tier_storage.creation import write_documents
from hicache_tier_storage.documents import document_problems
from hicache_tier_storage.identity import Identity
from hicache_tier_storage.inside import PARTITION_FILE
from hicache_tier_storage.journal import Journal
from hicache_tier_storage.metadata import read_attributes
from hicache_tier_storage.page_cipher import PageCipher
from hicache_tier_storage.partition_facts import PartitionFacts
from hicache_tier_storage.partition_files import PartitionPaths
from hicache_tier_storage.record import (
    AES_256_GCM,
    CHECKSUM_XXH3,
    COMMITTED,
    RECORD_NBYTES,
    as_records,
    as_words,
    committed,
    key_field,
    keys_of,
    new_records,
    seal,
)
from hicache_tier_storage.slab import SlabShape
from hicache_tier_storage.state import StateBlock, boot_id

from .target import Target

GEOMETRY = KVGeometry.mha(num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16", page_tokens=4)
_NBYTES = GEOMETRY.page_nbytes
_PART = PartName("0" * 32, "tp0of1-pp0of1-cp0of1", "kv")
_AXES = dict.fromkeys(("tp", "pp", "cp"), (0, 1))
_TEXTS = dict.fromkeys(("model", "revision", "tenant", "adapter", "scales", "rope", "key_algorithm"))


def _split(data: bytes) -> tuple[int, bytes]:
    """Take options from the first byte."""
    return (data[0], data[1:]) if data else (0, b"")


# -- slot records -------------------------------------------------------------------------------------------


def _records(_: Path) -> list[bytes]:
    records = new_records(3)
    keys = [b"k" * 32, b"short", b"x"]
    records["key"], records["key_nbytes"] = key_field(keys), [len(key) for key in keys]
    records["state"], records["generation"], records["valid_nbytes"] = COMMITTED, 4, _NBYTES
    records["algorithm"] = CHECKSUM_XXH3
    plain = as_words(records).tobytes()
    records["algorithm"] = AES_256_GCM
    return [b"\x01" + plain, b"\x03" + as_words(records).tobytes(), b"\x00" + bytes(RECORD_NBYTES)]


def _read_records(data: bytes, _: Path) -> None:
    options, raw = _split(data)
    words = np.frombuffer(bytearray(raw[: len(raw) // RECORD_NBYTES * RECORD_NBYTES]), np.uint64)
    words = words.reshape(-1, RECORD_NBYTES // 8)
    records, encrypted = as_records(words), bool(options & 2)
    if options & 1:
        seal(records)
    good = committed(records, _NBYTES, encrypted=encrypted)
    states, reasons = judge(words, _NBYTES, encrypted=encrypted)
    pages = states == SlotState.COMMITTED
    used = words.any(axis=1)
    assert (pages[good & used]).all(), "a reader serves what verify calls damaged"
    assert (good[pages]).all(), "verify calls sound what no reader serves"
    assert not pages[list(reasons)].any()
    kept = records[good]
    assert all(1 <= len(key) <= 32 for key in keys_of(kept))
    assert all(len(one) == 93 for one in PageCipher.contexts(kept, np.arange(len(kept), dtype=np.int64)))


# -- state blocks -------------------------------------------------------------------------------------------


def _states(_: Path) -> list[bytes]:
    block = StateBlock(bytes(16), boot_id(), 7, 3, True, 99, 16, 4096, _NBYTES, 64)
    return [b"\x01" + block.pack(), b"\x00" + block.pack()]


def _read_state(data: bytes, _: Path) -> None:
    options, raw = _split(data)
    if options & 1 and len(raw) >= 512:
        raw = raw[:12] + int(google_crc32c.value(raw[16:512])).to_bytes(4, "little") + raw[16:]
    with contextlib.suppress(StoreError):
        block = StateBlock.unpack(raw, "state")
        assert StateBlock.unpack(block.pack(), "again") == block


# -- documents of a store -----------------------------------------------------------------------------------


@cache
def _partition(folder: Path, check: str = "") -> PartitionPaths:
    space = "0123456789abcdef0123456789abcdef"
    paths = PartitionPaths(folder / (check or "0") / space / "tp0of1-w0" / "kv")
    paths.root.mkdir(parents=True, exist_ok=True)
    axes = 1 if len(check) == 32 else len(Layout.PAGE_FIRST.page_shape(GEOMETRY))
    shape = SlabShape.choose(_NBYTES, 1 << 20)
    facts = PartitionFacts("tp0of1", 0, "kv", 1 << 20, GEOMETRY, axes, shape, check if axes == 1 else "")
    write_documents(paths, facts, Layout.PAGE_FIRST, 64, Access.PRIVATE)
    return paths


def _groups(folder: Path) -> list[bytes]:
    return [(_partition(folder, check).root / "zarr.json").read_bytes() for check in ("", "c" * 32)]


def _read_group(data: bytes, folder: Path) -> None:
    paths = _partition(folder, "g")
    (paths.root / "zarr.json").write_bytes(data)
    with contextlib.suppress(StoreError):
        facts = PartitionFacts.read(paths)
        assert len(facts.shape.tail()) <= 16 << 20
        axis_order = read_attributes(paths.root, PARTITION_FILE).get("axis_order")
        assert isinstance(document_problems(paths, facts, axis_order), list)


def _arrays(folder: Path) -> list[bytes]:
    paths = _partition(folder)
    return [(paths.root / name / "zarr.json").read_bytes() for name in ("pages", "slots", "state")]


def _read_array(data: bytes, folder: Path) -> None:
    paths = _partition(folder, "a")
    for name in ("pages", "slots", "state"):
        (paths.root / name / "zarr.json").write_bytes(data)
    assert document_problems(paths, PartitionFacts.read(paths), "tlhd"), (
        "one document cannot be right for all"
    )


# -- journals -----------------------------------------------------------------------------------------------


def _journals(_: Path) -> list[bytes]:
    return [struct.pack("<Q", count) + np.arange(count, dtype="<u4").tobytes() for count in (0, 5, 300)]


def _read_journal(data: bytes, folder: Path) -> None:
    path = folder / "1" / "2" / "3" / "4" / "journal"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    writer = Journal(path, writable=True)
    reader = Journal(path, writable=False)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(data[:8])
        file.seek(4096)
        file.write(data[8:])
        if len(data) % 7 == 0:
            file.truncate(len(data))
    with contextlib.suppress(OSError):
        for _ in range(2):
            slots = reader.changes()
            assert slots is None or (len(slots) <= 32768 and (slots >= 0).all() and (slots < 1 << 32).all())
    reader.close()
    writer.close()


# -- archives -----------------------------------------------------------------------------------------------


def _facts(codec: Codec = Codec.NONE, pages: int = 5) -> PartFacts:
    return PartFacts(_PART, GEOMETRY, Layout.PAGE_FIRST, codec, pages, 8, pages * _NBYTES, has_tokens=True)


def _manifests(_: Path) -> list[bytes]:
    identity = Identity.build(GEOMETRY, Layout.PAGE_FIRST, pool="kv", **_TEXTS, **_AXES)
    found = [manifest_document([_facts()], {_PART.namespace: identity.as_attributes()})]
    return [json.dumps(one).encode() for one in found]


def _read_manifest(data: bytes, _: Path) -> None:
    with contextlib.suppress(ArchiveError, FormatVersionError):
        for part in parse_manifest(data, "archive").parts:
            assert part.name.valid
            assert 0 < part.geometry.page_nbytes <= 1 << 30
            assert 1 <= part.pages <= 1 << 40


class _Bytes:
    """A source of one file."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self, name: str) -> int:
        del name
        return len(self._data)

    def read(self, name: str, offset: int, into: Any) -> None:  # noqa: ANN401 - a buffer
        part = self._data[offset : offset + len(into)]
        if len(part) != len(into):
            raise UnreadableError(f"{name} is too short")
        into.data[:] = part

    def close(self) -> None:
        """Nothing is open."""


def _shards(_: Path) -> list[bytes]:
    lengths = np.full(5, _NBYTES, np.uint64)
    offsets = np.arange(5, dtype=np.uint64) * np.uint64(_NBYTES)
    return [b"\x01" + bytes(5 * _NBYTES) + pack_index(offsets, lengths, 8)]


def _read_shard(data: bytes, _: Path) -> None:
    options, raw = _split(data)
    if options & 1 and len(raw) >= 132:
        raw = raw[:-4] + int(google_crc32c.value(raw[-132:-4])).to_bytes(4, "little")
    part = ArchivePart(_Bytes(raw), _facts(Codec.ZSTD))
    with contextlib.suppress(UnreadableError):
        offsets, lengths = part._check_shard(0)  # noqa: SLF001 - what is fuzzed
        assert (offsets >= 0).all()
        assert (offsets + lengths <= len(raw)).all()


def _coded(_: Path) -> list[bytes]:
    page = np.arange(_NBYTES, dtype=np.uint8)
    return [bytes([at]) + bytes(codec.encoder(2)(page)) for at, codec in enumerate(Codec)]


def _read_coded(data: bytes, _: Path) -> None:
    options, raw = _split(data)
    page = np.zeros(_NBYTES, np.uint8)
    with contextlib.suppress(PageDamagedError):
        list(Codec)[options % len(Codec)].decode(memoryview(raw), page)


def _zips(_: Path) -> list[bytes]:
    whole = BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as packed:
        packed.writestr("zarr.json", b"{}")
        packed.writestr("a/b", b"x" * 100)
    wide = BytesIO()
    with zipfile.ZipFile(wide, "w") as packed, packed.open("c", "w", force_zip64=True) as member:
        member.write(b"y" * 10)
    return [whole.getvalue(), wide.getvalue()]


def _read_zip(data: bytes, _: Path) -> None:
    fd = os.memfd_create("zip")
    try:
        os.write(fd, data)
        with contextlib.suppress(ArchiveError):
            for member in read_directory(fd, Path("archive.zip")).values():
                start = data_offset(fd, member, Path("archive.zip"))
                assert 0 <= start <= start + member.nbytes <= len(data)
    finally:
        os.close(fd)


# -- what users name ----------------------------------------------------------------------------------------


def _texts(_: Path) -> list[bytes]:
    return [b"1 2, 3\n\n[4, 5]\n", b'{"tokens": [1, 2]}\n{"input_ids": [7]}\n']


def _arrays_of_tokens(_: Path) -> list[bytes]:
    found = []
    for array in (np.arange(6, dtype=np.int64), np.arange(6, dtype="<u4").reshape(2, 3)):
        whole = BytesIO()
        np.save(whole, array)
        found.append(whole.getvalue())
    return found


def _read_tokens(suffix: str) -> Any:  # noqa: ANN401 - a function
    def read(data: bytes, folder: Path) -> None:
        path = folder / f"tokens.{suffix}"
        path.write_bytes(data)
        with contextlib.suppress(InvalidArgumentError), np.errstate(over="ignore"):
            for prompt in read_prompts(path):
                assert prompt.dtype == np.uint32

    return read


def _traces(_: Path) -> list[bytes]:
    line = b'{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n'
    return [line, line + line.replace(b"0,", b"9,", 1)]


def _read_trace(data: bytes, folder: Path) -> None:
    path = folder / "trace.jsonl"
    path.write_bytes(data)
    with contextlib.suppress(TraceError):
        assert read_trace(path)


def _keys(_: Path) -> list[bytes]:
    return [b"0123456789abcdef" * 4 + b"\n", bytes(range(32))]


def _read_key(data: bytes, folder: Path) -> None:
    path = folder / "key"
    path.write_bytes(data)
    path.chmod(0o600)
    with contextlib.suppress(InvalidArgumentError):
        assert len(EncryptionKey.from_file(path).secret) == 32


TARGETS = (
    Target("records", _records, _read_records),
    Target("state", _states, _read_state),
    Target("group", _groups, _read_group),
    Target("array", _arrays, _read_array),
    Target("journal", _journals, _read_journal),
    Target("manifest", _manifests, _read_manifest),
    Target("shard", _shards, _read_shard),
    Target("codec", _coded, _read_coded),
    Target("zip", _zips, _read_zip),
    Target("tokens-text", _texts, _read_tokens("txt")),
    Target("tokens-npy", _arrays_of_tokens, _read_tokens("npy")),
    Target("trace", _traces, _read_trace),
    Target("key", _keys, _read_key),
)
