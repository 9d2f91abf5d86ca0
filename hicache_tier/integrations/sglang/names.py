"""Keys of the store for SGLang's keys, and the names of those that were looked up last."""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_DIGEST_NBYTES = 32
_DIGITS = 2 * _DIGEST_NBYTES
_NAME = np.dtype((np.void, _DIGEST_NBYTES))
_BATCH_KEYS: Final = 128  # as SGLang cuts what it loads, from the first key that it looked up
_MOST_BATCHES: Final = 64


def name_of(key: str) -> bytes:
    """Return the store's key for one of SGLang's: the 32 bytes that its 64 hex digits stand for.

    Any other text, which only callers outside of SGLang's controllers have, is hashed; no two texts share a
    name.
    """
    try:
        raw = bytes.fromhex(key)
    except ValueError:
        raw = b""
    if len(raw) == _DIGEST_NBYTES and raw.hex() == key:
        return raw
    return hashlib.sha256(b"sglang-text-key" + key.encode()).digest()


def names_of(keys: Sequence[str]) -> list[bytes]:
    """Return the store's keys for SGLang's, as `name_of` does: in one go where all are hashes."""
    if set(map(len, keys)) <= {_DIGITS}:
        digits = "".join(keys)
        try:
            raw = bytes.fromhex(digits)
        except ValueError:
            raw = b""
        if raw.hex() == digits:
            names: list[bytes] = np.frombuffer(raw, _NAME).tolist()
            return names
    return [name_of(key) for key in keys]


class LookedUp:
    """Keys of the last lookups with their names, for the loads that follow, of the same keys in batches.

    A batch that was looked up otherwise, or too long ago, is named anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[str, tuple[Sequence[str], list[bytes]]] = {}  # by the first key

    def __len__(self) -> int:
        return len(self._batches)

    def note(self, keys: Sequence[str], names: list[bytes]) -> None:
        """Remember what the keys of a lookup are called."""
        with self._lock:
            for at in range(0, min(len(keys), _MOST_BATCHES * _BATCH_KEYS), _BATCH_KEYS):
                batch = slice(at, at + _BATCH_KEYS)
                self._batches.pop(keys[at], None)  # the last noted is the last in order
                self._batches[keys[at]] = keys[batch], names[batch]
            while len(self._batches) > _MOST_BATCHES:
                del self._batches[next(iter(self._batches))]

    def names_of(self, keys: Sequence[str]) -> list[bytes]:
        """Return what `names_of` returns."""
        known, names = self._batches.get(keys[0], ((), [])) if keys else ((), [])
        if known[: len(keys)] == keys:
            return names[: len(keys)]
        return names_of(keys)
