"""Checksums of page payloads where they lie in memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

_TYPES: dict[int, Any] = {}


def memory(address: int, nbytes: int) -> Any:  # noqa: ANN401 - a ctypes array
    """View memory as a buffer, without a copy. The caller keeps it alive."""
    kind = _TYPES.get(nbytes)
    if kind is None:
        kind = _TYPES[nbytes] = ctypes.c_ubyte * nbytes
    return kind.from_address(address)


def page_checksum(addresses: Sequence[int], nbytes: Sequence[int], seed: int) -> int:
    """XXH3-64 over a page's segments in stored order, seeded with `record.checksum_seed(key)`."""
    if len(addresses) == 1:
        return xxhash.xxh3_64_intdigest(memory(addresses[0], nbytes[0]), seed)
    state = xxhash.xxh3_64(seed=seed)
    for address, length in zip(addresses, nbytes, strict=True):
        state.update(memory(address, length))
    return state.intdigest()
