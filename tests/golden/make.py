"""Write the golden stores of the format's versions, the same to the byte each time.

    python tests/golden/make.py [FOLDER]

Time, boot, process and store ids are fixed. Stores of released versions stay as they are for ever: make new
ones in a new folder when the format's version goes up.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import sys
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import google_crc32c

from hicache_tier import HostPool, KVGeometry, open_store
from hicache_tier.testing.array_pool import write_page
from hicache_tier_storage import EncryptionKey
from hicache_tier_storage.identity import FORMAT_VERSION, PLAIN_VERSION

HERE = Path(__file__).parent
STORES = HERE / f"v{PLAIN_VERSION}"
MANIFEST = "manifest.json"
NOW_NS = 1_760_000_000_123_456_789
BOOT = bytes.fromhex("00112233445566778899aabbccddeeff")
STORE_UUID = uuid.UUID("0f0e0d0c-0b0a-4908-8706-050403020100")
PID = 4242
LONG_KEY = b"a key of more than thirty-two bytes is stored as its SHA-256"
PAGES = 5
SLOTS_A_SLAB = 4


@dataclass(frozen=True)
class Golden:
    """How one golden store is made."""

    layout: str
    geometry: KVGeometry
    options: dict = field(default_factory=dict)
    checksums: bool = True
    unclean: bool = False

    @property
    def version(self) -> int:
        return FORMAT_VERSION if "encryption" in self.options else PLAIN_VERSION

    @property
    def key(self) -> bytes | None:
        key = self.options.get("encryption")
        return None if key is None else key.secret


GOLDEN = {
    "mha-page_first-bfloat16": Golden(
        "page_first",
        KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=16, dtype="bfloat16", page_tokens=8),
        {"model": "org/model", "revision": "r1", "adapter": "", "tp": (1, 2)},
    ),
    "mla-layer_first-float8_e4m3fn": Golden(
        "layer_first",
        KVGeometry.mla(num_layers=3, latent_dim=72, dtype="float8_e4m3fn", page_tokens=8),
        {"model": "org/mla", "tp": (3, 4), "tenant": "salt", "scales": "per_tensor"},
    ),
    "wide_k-page_first-bfloat16": Golden(
        "page_first",
        KVGeometry.mha(
            num_layers=2, num_kv_heads=2, head_dim=24, v_head_dim=16, dtype="bfloat16", page_tokens=4
        ),
        {"model": "org/wide"},
        checksums=False,
    ),
    "mha-page_head-float16": Golden(
        "page_head",
        KVGeometry.mha(num_layers=2, num_kv_heads=4, head_dim=8, dtype="float16", page_tokens=4),
        {"model": "org/heads", "rope": "yarn", "pp": (0, 2)},
        unclean=True,
    ),
    "indexer-page_first": Golden(
        "page_first",
        KVGeometry.indexer(num_layers=2, bytes_per_token=132, page_tokens=8),
        {"model": "org/mla"},
    ),
    "encrypted-layer_first-bfloat16": Golden(
        "layer_first",
        KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=16, dtype="bfloat16", page_tokens=8),
        {"model": "org/secret", "tenant": "salt", "encryption": EncryptionKey(bytes(range(32)))},
    ),
}


def key_of(number: int, name: str) -> bytes:
    return hashlib.sha256(f"{name}/{number}".encode()).digest()


def payload(key: bytes, nbytes: int) -> bytes:
    """Return the bytes of a page: they follow from its key."""
    return hashlib.shake_128(key).digest(nbytes)


def keys_of(name: str) -> list[bytes]:
    """Keys put: a chain of 32-byte keys, then a short one and a long one that start chains."""
    return [*(key_of(number, name) for number in range(PAGES)), b"\x01short", LONG_KEY]


def stored_key(key: bytes) -> bytes:
    return key if len(key) <= 32 else hashlib.sha256(key).digest()


def make(name: str, root: Path) -> dict[str, str]:
    """Make one store; return stored key (hex) to SHA-256 of the payload of every page to be served."""
    golden = GOLDEN[name]
    keys = keys_of(name)
    parents = [None, *keys[: PAGES - 1], None, None]
    stride = -(-golden.geometry.page_nbytes // 4096) * 4096
    capacity = 16 * SLOTS_A_SLAB * stride
    with (
        frozen(),
        HostPool(golden.geometry, golden.layout, len(keys)) as host,
        open_store(
            root,
            golden.geometry,
            golden.layout,
            capacity_bytes=capacity,
            io_mode="buffered",
            checksums=golden.checksums,
            **golden.options,
        ) as store,
    ):
        pages = host.alloc(len(keys))
        for page, key in zip(pages.tolist(), keys, strict=True):
            write_page(host, page, payload(key, golden.geometry.page_nbytes))
        for at, key in enumerate(keys):
            assert store.put([key], host, pages[at : at + 1], parents=[parents[at]], pin=at == 0) == [1]
        assert store.delete([keys[PAGES - 1]]) == [1]
    served = [key for at, key in enumerate(keys) if at != PAGES - 1]
    (partition,) = (path.parent for path in root.glob("*/*-w0/*/state"))
    (partition / "state" / "journal").unlink()  # a hint, and large
    tear(partition)
    if golden.unclean:
        served.remove(damage(partition, keys[2]))
    return {
        stored_key(key).hex(): hashlib.sha256(payload(key, golden.geometry.page_nbytes)).hexdigest()
        for key in sorted(served)
    }


def frozen() -> ExitStack:
    """Fix everything that would differ from one run to the next."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(time, "time_ns", lambda: NOW_NS))
    stack.enter_context(mock.patch.object(time, "time", lambda: NOW_NS / 1e9))
    stack.enter_context(mock.patch.object(os, "getpid", lambda: PID))
    stack.enter_context(mock.patch.object(os, "urandom", lambda size: hashlib.shake_128(b"r").digest(size)))
    stack.enter_context(mock.patch.object(uuid, "uuid4", lambda: STORE_UUID))
    for name, module in list(sys.modules.items()):
        if name.startswith("hicache_tier_storage") and hasattr(module, "boot_id"):
            stack.enter_context(mock.patch.object(module, "boot_id", lambda: BOOT))
    return stack


def tear(partition: Path) -> None:
    """Leave a slot as a kill in the middle of a put leaves it: the last of slab 1, its generation odd."""
    with (partition / "slots" / "c.1.0").open("r+b") as file:
        file.seek((SLOTS_A_SLAB - 1) * 128 + 8)
        (generation,) = struct.unpack("<Q", file.read(8))
        file.seek(-8, os.SEEK_CUR)
        file.write(struct.pack("<Q", generation | 1))
    (slab,) = (partition / "pages").glob("c.1.0*")
    stride = (slab.stat().st_size - 16 * SLOTS_A_SLAB - 4) // SLOTS_A_SLAB
    with slab.open("r+b") as file:
        file.seek((SLOTS_A_SLAB - 1) * stride)
        file.write(b"torn")


def damage(partition: Path, key: bytes) -> bytes:
    """Leave the store as a power loss does: not clean, and one page not as its checksum says."""
    table = (partition / "slots" / "c.0.0").read_bytes()
    (slot,) = (at // 128 for at in range(0, len(table), 128) if table[at + 16 : at + 48] == key)
    (slab,) = (partition / "pages").glob("c.0.0*")
    with slab.open("r+b") as file:
        file.seek(slot * (slab.stat().st_size // SLOTS_A_SLAB // 4096 * 4096) + 7)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    state = bytearray((partition / "state" / "c.0").read_bytes())
    state[56] = 0
    state[12:16] = struct.pack("<I", google_crc32c.value(bytes(state[16:512])))
    (partition / "state" / "c.0").write_bytes(state)
    return key


def make_all(folder: Path, version: int) -> None:
    names = [name for name, golden in GOLDEN.items() if golden.version == version]
    manifest = {name: make(name, folder / name) for name in names}
    text = json.dumps(manifest, indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n")


if __name__ == "__main__":
    for number in (PLAIN_VERSION, FORMAT_VERSION):
        target = (Path(sys.argv[1]) if len(sys.argv) > 1 else HERE) / f"v{number}"
        if target.exists():
            shutil.rmtree(target)
        target.mkdir(parents=True)
        make_all(target, number)
