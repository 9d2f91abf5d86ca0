"""Whole stores with damage in any file: what is served is right, and nothing raises but an opening."""

from __future__ import annotations

import contextlib
import logging
import shutil
import struct
from typing import TYPE_CHECKING, Final

from hicache_tier.errors import StoreError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import StoreRig, paths_of
from hicache_tier_storage import EncryptionKey
from hicache_tier_storage.inspection import inspect_root, verify_root

from .target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_EDIT = struct.Struct("<BBIQ")  # file, what to do, where, with what
_MOST_EDITS: Final = 12
_COUNT: Final = 12
_KEY: Final = EncryptionKey(bytes(range(32)))


def _made(folder: Path, key: EncryptionKey | None) -> Path:
    """Make a small store, once a folder."""
    root = folder / ("sealed" if key else "plain")
    if not root.exists():
        rig = StoreRig(root)
        store = rig.open(encryption=key)
        keys = keys_of("fuzz", _COUNT)
        rig.put(store, keys, parents=[None, *keys[:-1]])
        journal = paths_of(store).journal
        rig.close()
        journal.unlink()  # a hint, and the largest file
    return root


def _seeds(folder: Path) -> list[bytes]:
    del folder
    edits = [(file, kind, at, 0x41) for file in range(8) for kind, at in ((0, 100), (1, 8), (2, 1))]
    return [_EDIT.pack(*edit) for edit in edits] + [b"".join(_EDIT.pack(*edit) for edit in edits[:3])]


def _damage(root: Path, data: bytes) -> None:
    """Apply edits to the files of a store, in the order of their names."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    for at in range(0, min(len(data) // _EDIT.size, _MOST_EDITS) * _EDIT.size, _EDIT.size):
        number, kind, where, value = _EDIT.unpack_from(data, at)
        path = files[number % len(files)]
        raw = bytearray(path.read_bytes())
        where %= len(raw) + 1
        if kind % 4 == 0:
            raw[where : where + 1] = bytes([value & 0xFF])
        elif kind % 4 == 1:
            raw[where : where + 8] = value.to_bytes(8, "little")
        elif kind % 4 == 2:
            raw = raw[:where]
        else:
            raw += bytes(value % 5000)
        path.write_bytes(raw)


def _reader(key: EncryptionKey | None) -> Callable[[bytes, Path], None]:
    def read(data: bytes, folder: Path) -> None:
        root = folder / "damaged"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(_made(folder, key), root)
        _damage(root, data)
        with _quiet():
            _look_at(root, key)

    return read


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what damage makes a store say out of the log."""
    log = logging.getLogger("hicache_tier_storage")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _look_at(root: Path, key: EncryptionKey | None) -> None:
    """Inspect, verify, read and repair a store, whatever it is like."""
    keys = keys_of("fuzz", _COUNT)
    for look in (inspect_root, lambda place: verify_root(place, encryption=key)):
        with contextlib.suppress(StoreError):
            look(root)
    for read_only in (True, False):
        rig = StoreRig(root)
        with contextlib.suppress(StoreError):
            store = rig.open(encryption=key, read_only=read_only)
            rig.get(store, keys)  # which compares every byte of what is said to be loaded
            if not read_only:
                assert set(rig.put(store, keys)) <= {"stored", "already_stored"}
                assert set(rig.get(store, keys)) == {"loaded"}
        rig.close()


TARGETS = (
    Target("store", _seeds, _reader(None)),
    Target("encrypted-store", _seeds, _reader(_KEY)),
)
