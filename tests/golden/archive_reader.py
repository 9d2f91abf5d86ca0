"""A reader of "hct-archive" version 1 written from storage/ARCHIVE.md and FORMAT.md alone.

It imports nothing of the project. zarr-python opens the arrays as it opens any others; payloads that no codec
has touched are read from the shards by hand as well.
"""

from __future__ import annotations

import json
import struct
import zipfile
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import xxhash
import zarr
from zarr.storage import LocalStore, ZipStore

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1
UNKNOWN = 0xFFFF_FFFF
STORAGE = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
AXES = {"l": "layer", "t": "token", "h": "head", "d": "dim"}
ABSENT = {"mha": "", "mla": "h", "indexer": "th"}
CODECS = {
    "none": [],
    "fast": [("blosc", {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle"})],
    "small": [("blosc", {"cname": "zstd", "clevel": 3, "shuffle": "shuffle"})],
    "zstd": [("zstd", {"level": 1, "checksum": False})],
}


class FormatError(Exception):
    """The archive is not what the document says."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise FormatError(what)


@dataclass
class Part:
    """One part: its entry in the manifest, pages by key, and the index."""

    entry: dict
    pages: dict[bytes, bytes] = field(default_factory=dict)
    rows: dict[bytes, dict] = field(default_factory=dict)


def read_archive(path: Path) -> dict[str, Part]:
    """Read every part of a folder or zip, checking each page."""
    packed = zipfile.ZipFile(path) if path.suffix == ".zip" else None
    if packed is not None:
        require(all(info.compress_type == zipfile.ZIP_STORED for info in packed.infolist()), "compressed")
        require(packed.namelist()[-1] == "zarr.json", "the manifest is not the last member")

    def read(name: str) -> bytes:
        return packed.read(name) if packed is not None else (path / name).read_bytes()

    manifest = json.loads(read("zarr.json"))["attributes"]["hicache_tier"]
    require(manifest["format"] == "hct-archive", "not an archive")
    if manifest["version"] > VERSION:
        raise FormatError(f"version {manifest['version']}, this reader knows {VERSION}")
    store = ZipStore(path, mode="r") if packed is not None else LocalStore(path, read_only=True)
    root = zarr.open_group(store, mode="r")
    found = {}
    for entry in manifest["parts"]:
        name = f"{entry['namespace']}/{entry['rank']}/{entry['pool']}"
        identity = manifest["namespaces"][entry["namespace"]]
        require(
            root[entry["namespace"]].attrs["hicache_tier"] == identity, "identity of the namespace's group"
        )
        require(root[name].attrs["hicache_tier"] == entry, "the part's group repeats its entry")
        require(identity["pools"][entry["pool"]] == entry["geometry"], "geometry")
        require(identity["axis_order"] == entry["axis_order"], "axis order")
        documents = json.loads(read(f"{name}/zarr.json"))["consolidated_metadata"]["metadata"]
        for array, document in documents.items():
            require(json.loads(read(f"{name}/{array}/zarr.json")) == document, f"{array}: consolidated")
        found[name] = read_part(root[name], entry, documents["pages"])
        check_shards(read, name, entry, found[name], documents["pages"])
    if packed is not None:
        packed.close()
        store.close()
    return found


def page_layout(entry: dict) -> tuple[list[int], list[str], str]:
    """Shape, dimension names and storage dtype of a page."""
    geometry = entry["geometry"]
    parts = geometry["components"]
    storage = STORAGE.get(geometry["dtype"], geometry["dtype"])
    if len({(part["heads"], part["width"]) for part in parts}) > 1:
        return [entry["page_nbytes"]], ["byte"], "uint8"
    sizes = {
        "l": geometry["num_layers"],
        "t": geometry["rows"],
        "h": parts[0]["heads"],
        "d": parts[0]["width"],
    }
    axes = [axis for axis in entry["axis_order"] if axis not in ABSENT[geometry["kind"]]]
    lead = [len(parts)] if len(parts) > 1 else []
    names = ["kv"] if lead else []
    return [*lead, *(sizes[axis] for axis in axes)], [*names, *(AXES[axis] for axis in axes)], storage


def read_part(group: zarr.Group, entry: dict, document: dict) -> Part:
    count = entry["pages"]
    shape, names, storage = page_layout(entry)
    pages = group["pages"]
    require(pages.shape == (count, *shape), "shape of pages")
    require(pages.dtype == storage, "storage dtype")
    require(list(pages.metadata.dimension_names) == ["page", *names], "dimension names")
    require(prod(shape) * pages.dtype.itemsize == entry["page_nbytes"], "bytes a page")
    (sharding,) = document["codecs"]
    inner = sharding["configuration"]["codecs"][1:]
    require(sharding["configuration"]["chunk_shape"] == [1, *shape], "an inner chunk is a page")
    require(sharding["configuration"]["index_location"] == "end", "index at the end")
    wanted = CODECS[entry["codec"]]
    require([codec["name"] for codec in inner] == [name for name, _ in wanted], "codec")
    for codec, (_, settings) in zip(inner, wanted, strict=True):
        require(settings.items() <= codec["configuration"].items(), "settings of the codec")
    index = {
        name: group[name] for name in ("key", "key_nbytes", "checksum", "parent", "created_ns", "access_s")
    }
    index |= {name: group[name] for name in ("tokens", "flags")}
    if entry["token_ids"]:
        index["token_ids"] = group["token_ids"]
        require(index["token_ids"].shape == (count, entry["geometry"]["page_tokens"]), "shape of token_ids")
    require(all(array.shape[0] == count for array in index.values()), "length of the index")
    require(all(array.chunks[0] == min(count, 65536) for array in index.values()), "chunks of the index")
    values = {name: array[:] for name, array in index.items()}
    part = Part(entry)
    payloads = pages[:]
    for at in range(count):
        key = values["key"][at].tobytes()
        require(not any(key[values["key_nbytes"][at] :]), "key padding")
        key = key[: values["key_nbytes"][at]]
        payload = np.ascontiguousarray(payloads[at]).tobytes()
        seed = xxhash.xxh3_64_intdigest(key, len(key))
        require(xxhash.xxh3_64_intdigest(payload, seed) == int(values["checksum"][at]), "checksum")
        require(key not in part.pages, "a key twice")
        part.pages[key] = payload
        part.rows[key] = {name: values[name][at] for name in values}
    return part


def check_shards(read, name: str, entry: dict, part: Part, document: dict) -> None:
    """Look at the shard files by hand: their sizes, and the pages where no codec has touched them."""
    keys, capacity, total = [*part.pages], entry["shard_pages"], 0
    require(capacity & (capacity - 1) == 0 and capacity <= 1 << 20, "pages a shard")
    require(document["chunk_grid"]["configuration"]["chunk_shape"][0] == capacity, "a shard is a chunk")
    dots = ".0" * (len(document["shape"]) - 1)
    for shard in range(-(-len(keys) // capacity)):
        raw = read(f"{name}/pages/c.{shard}{dots}")
        total += len(raw)
        pairs = list(struct.iter_unpack("<QQ", raw[-16 * capacity - 4 : -4]))
        held = keys[shard * capacity : (shard + 1) * capacity]
        require(
            all(pair == (2**64 - 1, 2**64 - 1) for pair in pairs[len(held) :]), "chunks that are not there"
        )
        if entry["codec"] == "none":
            for key, (offset, nbytes) in zip(held, pairs, strict=False):
                require(raw[offset : offset + nbytes] == part.pages[key], "payload in the shard")
    require(total == entry["stored_bytes"], "stored bytes")


def chain(part: Part, key: bytes) -> list[bytes]:
    """Keys from the root of a chain down to `key`."""
    heads = {int.from_bytes(name[:8].ljust(8, b"\0"), "little"): name for name in part.pages}
    line = [key]
    while (parent := int(part.rows[line[-1]]["parent"])) != 0:
        line.append(heads[parent])
    return line[::-1]


def tokens_of(part: Part, key: bytes) -> list[int]:
    """Return the prompt that leads to the end of a page, by the token ids of its chain."""
    found = []
    for name in chain(part, key):
        ids = part.rows[name]["token_ids"].tolist()
        require(UNKNOWN not in ids, "token ids that are not known")
        found += ids
    return found
