"""Pages for `bench storage`: random bytes in a host pool, and names for them."""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.host_pool import HostPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_tier.geometry import KVGeometry

_SEED = 20261129


def random_pool(geometry: KVGeometry, layout: str, pages: int) -> HostPool:
    """Return a host pool whose first half holds random bytes and whose second half is zero."""
    host = HostPool(geometry, layout=layout, num_pages=2 * pages)
    random = np.random.default_rng(_SEED)
    for row in host.segments(range(pages)):
        for address, nbytes in row:
            ctypes.memmove(address, random.bytes(nbytes), nbytes)
    return host


def page_bytes(host: HostPool, page: int) -> bytes:
    """Copy one page out of a pool."""
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in host.segments([page])[0])


def page_buffers(host: HostPool, pages: Sequence[int]) -> list[list[memoryview]]:
    """View each page's segments as buffers, once, so that no peer pays for it."""
    return [
        [
            np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address)).data
            for address, nbytes in row
        ]
        for row in host.segments(pages)
    ]


def make_keys(tag: str, count: int) -> list[bytes]:
    """Return distinct page keys."""
    return [hashlib.sha256(f"{tag}-{number}".encode()).digest() for number in range(count)]
