"""A reader of format "hct" versions 1 and 2 written from storage/FORMAT.md alone.

It imports nothing of the project, so that the document, and not the code, is what it agrees with.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 2
RECORD = struct.Struct("<IBBBBQ32sQQIIQQIIQ24s")
FREE, WRITING, COMMITTED, BAD = 0, 1, 2, 3
ITEMSIZE = {"float16": 2, "float32": 4, "int8": 1, "uint8": 1, "uint16": 2}
STORAGE = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}


class FormatError(Exception):
    """The tree is not what the format says."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise FormatError(what)


def _crc32c_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _crc32c_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), reflected, initial value and final xor all ones."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


@dataclass(frozen=True)
class Record:
    crc: int
    version: int
    state: int
    algorithm: int
    key_nbytes: int
    generation: int
    raw_key: bytes
    sequence: int
    checksum: int
    valid_nbytes: int
    epoch: int
    created_ns: int
    parent: int
    tokens: int
    flags: int
    access_s: int
    reserved: bytes

    @property
    def key(self) -> bytes:
        return self.raw_key[: self.key_nbytes]


@dataclass
class Partition:
    """One partition: pages to serve, and what is dropped."""

    path: str
    attributes: dict
    clean: bool
    boot_id: bytes
    pages: dict[bytes, bytes] = field(default_factory=dict)
    records: dict[bytes, Record] = field(default_factory=dict)
    unfinished: int = 0
    free: int = 0
    damaged: list[bytes] = field(default_factory=list)


def read_store(root: Path, boot_id: bytes = bytes(16), key: bytes | None = None) -> list[Partition]:
    """Read every partition, as a reader of the host boot `boot_id`; `key` is that of encrypted pages."""
    found = []
    for space in sorted(path for path in root.iterdir() if path.is_dir()):
        require(re.fullmatch(r"[0-9a-f]{32}", space.name), f"{space.name} is no namespace")
        identity = group(space)
        check_key(identity, space.name, key)
        for rank in sorted(path for path in space.iterdir() if path.is_dir()):
            require(
                re.fullmatch(r"[a-z]+\d+of\d+(-[a-z]+\d+of\d+)*-w\d+", rank.name), f"{rank.name}: no rank"
            )
            require(document(rank)["node_type"] == "group", f"{rank.name} is no group")
            for pool in sorted(path for path in rank.iterdir() if path.is_dir()):
                found.append(read_partition(root, pool, identity, boot_id, key))
    return found


def namespace_of(identity: dict, tenant: str | None) -> str:
    """Digest of an identity; the tenant's salt is not in the group and must be known."""
    pools = sorted(identity["pools"].items())
    fields = [
        ("model", identity["model"]),
        ("revision", identity["revision"]),
        ("scales", identity["scales"]),
        *(item for name, geometry in pools for item in pool_fields(name, geometry)),
        ("axis_order", identity["axis_order"]),
        *(
            (f"{n}_size", str(identity["parallel"][n]))
            for n in ("tp", "pp", "cp")
            if n in identity["parallel"]
        ),
        ("rope", identity["rope"]),
        ("key_algorithm", identity["key_algorithm"]),
        ("tenant", tenant),
        ("adapter", identity["adapter"]),
        *([("encryption", identity["encryption"]["algorithm"])] if "encryption" in identity else []),
    ]
    digest = hashlib.sha256(b"hct-namespace-1")
    for tag, value in fields:
        raw = b"" if value is None else value.encode()
        digest.update(len(tag).to_bytes(4, "little") + tag.encode())
        digest.update(bytes([value is not None]) + len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:32]


def pool_fields(name: str, geometry: dict) -> list[tuple[str, str]]:
    parts = (f"{part['name']}:{part['heads']}x{part['width']}" for part in geometry["components"])
    return [
        ("pool", name),
        ("dtype", geometry["dtype"]),
        ("kind", geometry["kind"]),
        ("layers", str(geometry["num_layers"])),
        ("components", ",".join(parts)),
        ("page_tokens", str(geometry["page_tokens"])),
        ("rows", str(geometry["rows"])),
    ]


def document(folder: Path) -> dict:
    found = json.loads((folder / "zarr.json").read_bytes())
    require(found["zarr_format"] == 3, f"{folder}: not Zarr v3")
    return found


def group(folder: Path) -> dict:
    found = document(folder)
    require(found["node_type"] == "group", f"{folder}: not a group")
    attributes = found["attributes"]["hicache_tier"]
    require(attributes["format"] == "hct", f"{folder}: not a store")
    if attributes["version"] > VERSION:
        raise FormatError(f"{folder}: version {attributes['version']}, this reader knows {VERSION}")
    return attributes


def hkdf_expand(key: bytes, info: bytes, nbytes: int) -> bytes:
    """RFC 5869, 2.3, with SHA-256."""
    output = block = b""
    for number in range(1, -(-nbytes // 32) + 1):
        block = hmac.digest(key, block + info + bytes([number]), "sha256")
        output += block
    return output[:nbytes]


def check_key(attributes: dict, namespace: str, key: bytes | None) -> None:
    told = attributes.get("encryption")
    require((attributes["version"] == 2) == (told is not None), "version 2 is what is encrypted")
    require((told is None) == (key is None), "a key is needed where pages are encrypted, and only there")
    if told is not None and key is not None:
        require(told["algorithm"] == "aes-256-gcm", "encryption")
        check = hkdf_expand(key, b"hct-key-check-1" + namespace.encode(), 16).hex()
        require(told["key_check"] == check, "another key")


class Cipher:
    """Pages of one encrypted partition."""

    def __init__(self, key: bytes, place: str) -> None:
        self._place = place.encode()
        self._key = hkdf_expand(key, b"hct-partition-1" + self._place, 32)

    def decrypt(self, slot: int, record: bytes, payload: bytes) -> bytes | None:
        """Return the page, or None where it is not authentic."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        context = struct.pack("<Q", slot) + record[7:8] + record[16:92] + record[120:128]
        derived = hkdf_expand(self._key, b"hct-page-1" + context, 44)
        try:
            tag = record[104:120]
            return AESGCM(derived[:32]).decrypt(derived[32:], payload + tag, self._place + b"\0" + context)
        except InvalidTag:
            return None


def read_partition(root: Path, folder: Path, identity: dict, boot_id: bytes, key: bytes | None) -> Partition:
    attributes = group(folder)
    check_key(attributes, folder.parts[-3], key)
    cipher = None if key is None else Cipher(key, "/".join(folder.parts[-3:]))
    rank, _, writer = folder.parent.name.rpartition("-w")
    require(attributes["rank"] == rank, "rank")
    require(attributes["writer"] == int(writer), "writer")
    require(attributes["pool"] == folder.name and folder.name in identity["pools"], "pool")
    require((folder / "state" / "writer.lock").exists(), "no writer's lock")
    slots, stride, page_nbytes = (attributes[n] for n in ("slots_per_slab", "stride", "page_nbytes"))
    require(slots & (slots - 1) == 0, "slots a slab must be a power of two")
    require(stride == -(-page_nbytes // 4096) * 4096, "stride")
    capacity, page_shape = check_arrays(folder, attributes)
    state = check_state((folder / "state" / "c.0").read_bytes(), attributes, capacity)
    found = Partition(str(folder.relative_to(root)), attributes, bool(state[6]), state[3])
    suspect = not found.clean and found.boot_id != boot_id
    suffix = ".0" * len(page_shape)
    tables = {int(path.name.split(".")[1]): path for path in (folder / "slots").glob("c.*.0")}
    slabs = {int(path.name.split(".")[1]) for path in (folder / "pages").glob("c.*")}
    require(slabs == set(tables), "a slab has a table, and a table a slab")
    for number, path in sorted(tables.items()):
        require((number + 1) * slots <= capacity, "a slab beyond the array")
        table, slab = path.read_bytes(), (folder / "pages" / f"c.{number}{suffix}").read_bytes()
        require(len(table) == slots * 128, f"{path.name}: size")
        check_tail(slab, slots, stride, page_nbytes)
        for at in range(slots):
            payload = slab[at * stride : at * stride + page_nbytes]
            record = table[at * 128 : at * 128 + 128]
            if cipher is None:
                take(found, record, payload, suspect)
            elif any(record):
                page = cipher.decrypt(number * slots + at, record, payload)
                take(found, record, payload, suspect, page=page, encrypted=True)
            else:
                found.free += 1
    return found


def check_arrays(folder: Path, attributes: dict) -> tuple[int, list[int]]:
    """Check the three arrays; return capacity in slots and the page's shape."""
    slots = attributes["slots_per_slab"]
    pages, table, state = (document(folder / name) for name in ("pages", "slots", "state"))
    for array in (pages, table, state):
        require(array["node_type"] == "array", "not an array")
        encoding = {"name": "default", "configuration": {"separator": "."}}
        require(array["chunk_key_encoding"] == encoding, "chunk keys")
        require(array["fill_value"] == 0, "fill value")
        require(len(array["dimension_names"]) == len(array["shape"]), "dimension names")
    capacity, *page_shape = pages["shape"]
    components = attributes["components"]
    sizes = [prod(part["shape"]) * itemsize(part["dtype"]) for part in components]
    require([part["offset"] for part in components] == [sum(sizes[:i]) for i in range(len(sizes))], "offsets")
    require(attributes["page_nbytes"] == sum(sizes), "bytes a page")
    encrypted = "encryption" in attributes
    require(encrypted == ("encryption" in pages["attributes"]["hicache_tier"]), "the array says it too")
    if encrypted or len({tuple(part["shape"]) for part in components}) > 1:
        require(page_shape == [sum(sizes)], "a page of bytes")
        require(pages["data_type"] == "uint8", "bytes are uint8")
        require(pages["dimension_names"] == ["slot", "byte"], "dimension names")
    else:
        lead, names = ([len(components)], ["kv"]) if len(components) > 1 else ([], [])
        require(page_shape == [*lead, *components[0]["shape"]], "page shape")
        require(pages["dimension_names"] == ["slot", *names, *components[0]["dimension_names"]], "names")
        logical = attributes["logical_dtype"]
        require(pages["data_type"] == STORAGE.get(logical, logical), "storage dtype")
    (sharding,) = pages["codecs"]
    wanted = {
        "chunk_shape": [1, *page_shape],
        "codecs": [LITTLE_ENDIAN],
        "index_codecs": [LITTLE_ENDIAN, {"name": "crc32c"}],
        "index_location": "end",
    }
    require(sharding == {"name": "sharding_indexed", "configuration": wanted}, "sharding")
    require(pages["chunk_grid"]["configuration"]["chunk_shape"] == [slots, *page_shape], "a shard is a slab")
    require((table["shape"], table["data_type"]) == ([capacity, 128], "uint8"), "slot table")
    require(table["chunk_grid"]["configuration"]["chunk_shape"] == [slots, 128], "a chunk a slab")
    require((state["shape"], state["data_type"]) == ([4096], "uint8"), "state")
    require(table["codecs"] == state["codecs"] == [LITTLE_ENDIAN], "plain bytes")
    require(capacity % slots == 0, "whole slabs")
    return capacity, page_shape


def itemsize(logical: str) -> int:
    return ITEMSIZE[STORAGE.get(logical, logical)]


def check_state(raw: bytes, attributes: dict, capacity: int) -> tuple:
    require(len(raw) == 4096, "state block: size")
    fields = struct.unpack_from("<8sII16s16sIIB7xQQQQQ", raw)
    magic, version, crc, *rest = fields
    require(magic == b"HCTSTATE", "state block: magic")
    require(version == 1, f"state block: version {version}")
    require(crc == crc32c(raw[16:512]), "state block: CRC")
    require(raw[104:] == bytes(4096 - 104), "state block: the rest is zero")
    shape = tuple(rest[6:])
    wanted = tuple(attributes[name] for name in ("slots_per_slab", "stride", "page_nbytes"))
    require(shape == (*wanted, capacity), "state block: sizes")
    _, boot, _, epoch, clean, sequence = rest[:6]
    return version, crc, rest[0], boot, epoch, sequence, clean


def check_tail(slab: bytes, slots: int, stride: int, page_nbytes: int) -> None:
    require(len(slab) == slots * stride + 16 * slots + 4, "slab: size")
    index = slab[slots * stride : -4]
    require(struct.unpack("<I", slab[-4:]) == (crc32c(index),), "slab: CRC of the index")
    pairs = list(struct.iter_unpack("<QQ", index))
    require(pairs == [(at * stride, page_nbytes) for at in range(slots)], "slab: index")


def take(
    found: Partition,
    raw: bytes,
    payload: bytes,
    suspect: bool,
    *,
    page: bytes | None = None,
    encrypted: bool = False,
) -> None:
    """Judge one slot and keep its page if it is to be served; `page` is what it decrypts to."""
    if not any(raw):
        found.free += 1
        return
    record = Record(*RECORD.unpack(raw))
    if record.generation & 1:
        found.unfinished += 1
        return
    require(record.crc == crc32c(raw[4:]), "record: CRC")
    require(record.version == 1, "record: version")
    if record.state != COMMITTED:
        found.free += record.state == FREE
        return
    require(1 <= record.key_nbytes <= 32, "record: key length")
    require(not any(record.raw_key[record.key_nbytes :]), "record: key padding")
    require(encrypted or not any(record.reserved), "record: reserved bytes")
    require(record.valid_nbytes == len(payload), "record: valid bytes")
    require(record.algorithm in ({3} if encrypted else {0, 2}), "record: checksum algorithm")
    if encrypted:
        good = page is not None
        payload = page or b""
    elif record.algorithm == 2:
        seed = xxhash.xxh3_64_intdigest(record.key, len(record.key))
        good = xxhash.xxh3_64_intdigest(payload, seed) == record.checksum
    else:
        good = not suspect
    if not good:
        require(suspect, "a page that is not suspect has a wrong checksum")
        found.damaged.append(record.key)
        return
    older = found.records.get(record.key)
    if older is None or older.sequence < record.sequence:
        found.records[record.key] = record
        found.pages[record.key] = payload


def chain(found: Partition, key: bytes) -> list[bytes]:
    """Keys from the root of a chain down to `key`, by the records' parents."""
    heads = {int.from_bytes(name[:8].ljust(8, b"\0"), "little"): name for name in found.pages}
    line = [key]
    while (parent := found.records[line[-1]].parent) != 0:
        line.append(heads[parent])
    require(all(a != b for a, b in pairwise(line)), "a chain that goes in a circle")
    return line[::-1]
