"""Keys of the store for SGLang's keys."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_DIGEST_NBYTES = 32
_DIGITS = 2 * _DIGEST_NBYTES


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
            return [raw[at : at + _DIGEST_NBYTES] for at in range(0, len(raw), _DIGEST_NBYTES)]
    return [name_of(key) for key in keys]
