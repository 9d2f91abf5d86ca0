"""Pages whose bytes follow from their key, written and checked on a device, all of them."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from hicache_tier.device_pool import DevicePool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_tier.geometry import KVGeometry

_KEY_WORDS = 4  # a key is 32 bytes
_CHUNK_NBYTES = 32 << 20
_BLANK = {torch.uint8: 0xA5, torch.int64: int.from_bytes(8 * b"\xa5", "little", signed=True)}
_SEED = 20261130


def block_keys(blocks: Sequence[int], pages_a_block: int) -> list[bytes]:
    """Return the keys of a prompt's pages; equal ids mean equal prefixes, so that no chain is needed."""
    return [
        sha256(f"hicache-tier replay {block} {part}".encode()).digest()
        for block in blocks
        for part in range(pages_a_block)
    ]


class KeyedPages:
    """A device pool, and what belongs into the pages of keys: noise that is the same for all, XOR the key.

    Every 32 bytes hold the whole key, so pages of two keys differ in each of them, and a page with a part
    shifted, swapped, cut or of another key is seen.

    Parameters
    ----------
    geometry : KVGeometry
    num_pages : int
    device : torch.device
    """

    def __init__(self, geometry: KVGeometry, num_pages: int, device: torch.device) -> None:
        self.pool = DevicePool.empty(geometry, num_pages, device)
        planes = [_plane(tensor, num_pages) for tensor in _tensors(self.pool)]
        self._page_nbytes = sum(plane.shape[1] for plane in planes)
        # Words where pages have whole ones: an eighth of the elements to move and compare.
        whole = all(plane.shape[1] % 8 == 0 for plane in planes)
        self._unit = torch.int64 if whole else torch.uint8
        self._planes = [plane.view(self._unit) for plane in planes]
        self._width = sum(plane.shape[1] for plane in self._planes)
        rows = -(-self._page_nbytes // (8 * _KEY_WORDS))
        random = torch.Generator().manual_seed(_SEED)
        noise = torch.randint(-(2**63), 2**63 - 1, (rows, _KEY_WORDS), dtype=torch.int64, generator=random)
        self._noise = noise.to(device)
        self._device = device

    def compute(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Write what belongs to the keys into pages, as a model would."""
        for numbers, content in self._content(pages, keys):
            for plane, part in self._parts(content):
                plane[numbers] = part

    def blank(self, pages: Sequence[int]) -> None:
        """Write into pages what belongs to no key."""
        numbers = torch.tensor(list(pages), dtype=torch.int64, device=self._device)
        for plane in self._planes:
            plane[numbers] = _BLANK[self._unit]

    def wrong(self, pages: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Return the positions of the pages that do not hold, to the byte, what belongs to their keys."""
        found: list[int] = []
        first = 0
        for numbers, content in self._content(pages, keys):
            good = torch.ones(len(numbers), dtype=torch.bool, device=self._device)
            for plane, part in self._parts(content):
                good &= (plane[numbers] == part).all(dim=1)
            found += [first + int(position) for position in torch.nonzero(~good).flatten().tolist()]
            first += len(numbers)
        return found

    def _content(
        self, pages: Sequence[int], keys: Sequence[bytes]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield page numbers `[n]` and the content of their keys, `[n, width]`, in parts of bounded size."""
        step = max(1, _CHUNK_NBYTES // self._page_nbytes)
        for start in range(0, len(pages), step):
            part = keys[start : start + step]
            words = torch.frombuffer(bytearray(b"".join(part)), dtype=torch.int64).view(-1, 1, _KEY_WORDS)
            content = (self._noise ^ words.to(self._device)).view(len(part), -1).view(self._unit)
            numbers = torch.tensor(list(pages[start : start + step]), dtype=torch.int64, device=self._device)
            yield numbers, content[:, : self._width]

    def _parts(self, content: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        at = 0
        for plane in self._planes:
            yield plane, content[:, at : at + plane.shape[1]]
            at += plane.shape[1]


def _tensors(pool: DevicePool) -> list[torch.Tensor]:
    return [tensor for layer in pool.layers for tensor in (layer if isinstance(layer, tuple) else (layer,))]


def _plane(tensor: torch.Tensor, num_pages: int) -> torch.Tensor:
    """View one layer's tensor as `[page, byte]`."""
    return tensor.view(torch.uint8).reshape(-1).view(num_pages, -1)
