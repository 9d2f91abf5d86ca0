"""Page keys as a tier takes them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hicache_tier.errors import InvalidArgumentError
from hicache_tier_storage.keys import normalise_keys

if TYPE_CHECKING:
    from collections.abc import Iterable


def distinct_keys(keys: Iterable[bytes | str]) -> list[bytes]:
    """Return keys in the form that the store uses: bytes as they are, hex text decoded.

    Raises
    ------
    InvalidArgumentError
        Where one is not a key, or occurs twice: a page has one place in a prefix.
    """
    names = normalise_keys(keys)
    if len(set(names)) != len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise InvalidArgumentError(f"key {twice.hex()} occurs twice in one call; a page has one place.")
    return names
