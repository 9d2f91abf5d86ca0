"""Pages whose bytes follow from their keys, so that any reader can tell whether they are the right ones."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_tier.host_pool import HostPool


def key_of(number: int, salt: str = "") -> bytes:
    """Key of test page `number`: 32 bytes."""
    return hashlib.sha256(f"{salt}/{number}".encode()).digest()


def page_bytes(key: bytes, nbytes: int) -> bytes:
    """Payload of the page with this key: incompressible, and different for every key."""
    words = np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
    return words.bytes(nbytes)


def fill(host: HostPool, pages: Sequence[int] | torch.Tensor, keys: Sequence[bytes]) -> None:
    """Fill pages of a host pool so that what is stored of each is `page_bytes(key, page_nbytes)`."""
    for page, key in zip(pages, keys, strict=True):
        write_page(host, int(page), page_bytes(key, host.page_nbytes))


def write_page(host: HostPool, page: int, stored: bytes) -> None:
    """Fill one page of a host pool with the bytes of a stored page."""
    raw = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
    offset = 0
    for view in host.page_views(page).values():
        nbytes = view.numel() * view.element_size()
        view.copy_(raw[offset : offset + nbytes].view(view.dtype).view(view.shape))
        offset += nbytes


def stored_bytes(host: HostPool, page: int) -> bytes:
    """Return one page of a host pool as it would be stored."""
    views = host.page_views(page).values()
    return b"".join(view.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for view in views)
