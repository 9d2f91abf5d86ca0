"""Page keys as the store takes them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

from hicache_tier.errors import InvalidArgumentError

from .record import KEY_MAX_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

PageKey = bytes | str
_LENGTHS = frozenset(range(1, KEY_MAX_NBYTES + 1))


def normalise_key(key: object) -> bytes:
    """Return the stored form of a key: 1 to 32 bytes as they are, hex text decoded, longer as SHA-256.

    Raises
    ------
    InvalidArgumentError
        For an empty key, text that is not hex, or another type.
    """
    if isinstance(key, str):
        try:
            raw = bytes.fromhex(key)
        except ValueError as error:
            raise InvalidArgumentError(f"a text key must be hex digits, got {key[:80]!r}.") from error
    elif isinstance(key, bytes | bytearray | memoryview):
        try:
            raw = bytes(key)
        except ValueError as error:  # a view that was released
            raise InvalidArgumentError(f"a key cannot be read: {error}.") from error
    else:
        raise InvalidArgumentError(f"a key must be bytes or hex text, got {type(key).__name__}.")
    if not raw:
        raise InvalidArgumentError("a key must not be empty.")
    return raw if len(raw) <= KEY_MAX_NBYTES else hashlib.sha256(raw).digest()


def normalise_keys(keys: Iterable[PageKey]) -> list[bytes]:
    """Return the stored form of every key."""
    if isinstance(keys, str | bytes | bytearray):
        raise InvalidArgumentError("keys must be a sequence of keys, got a single one.")
    names = list(keys)
    if set(map(type, names)) == {bytes} and _LENGTHS.issuperset(map(len, names)):  # no Python code a key
        return cast("list[bytes]", names)
    return [normalise_key(key) for key in names]
