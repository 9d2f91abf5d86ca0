"""Pages whose content follows from their number, made and checked many at a time."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.geometry import KVGeometry
from hicache_tier.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

GEOMETRY = KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=32, dtype="bfloat16", page_tokens=8)
LAYOUT = Layout.PAGE_FIRST
PAGE_NBYTES = GEOMETRY.page_nbytes  # 4096
NUMBERS = 1 << 13  # pages that there can be
CHAIN = 64  # of which as many make a prompt
CHAINS = NUMBERS // CHAIN
BATCH = 32  # pages a put, at most
_ALIGNMENT = 4096
_WORDS = PAGE_NBYTES // 8
_PIECES = 4  # segments of a page in memory
_RANDOM = np.random.Generator(np.random.PCG64(20))
_FACTORS = _RANDOM.integers(0, 1 << 63, _WORDS, np.uint64) | np.uint64(1)
_OFFSETS = _RANDOM.integers(0, 1 << 63, _WORDS, np.uint64)
_BLANK = np.uint64(0xA5A5A5A5A5A5A5A5)


def key_of(number: int) -> bytes:
    """Key of page `number`: its first 8 bytes are the number, so that an index is read at a glance."""
    head = number.to_bytes(8, "little")
    return head + hashlib.blake2b(head, digest_size=24).digest()


KEYS = [key_of(number) for number in range(NUMBERS)]


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    """Return the keys of pages."""
    return [KEYS[number] for number in numbers]


def parents_of(numbers: Iterable[int]) -> list[bytes | None]:
    """Return the keys of the pages before these in their prompts."""
    return [KEYS[number - 1] if number % CHAIN else None for number in numbers]


def numbers_of(keys: Iterable[bytes]) -> NDArray[np.int64]:
    """Return the numbers of keys."""
    return np.frombuffer(b"".join(keys), np.int64)[::4]


def content(numbers: ArrayLike) -> NDArray[np.uint64]:
    """Bytes of pages as words, `[n, PAGE_NBYTES / 8]`: no word of one page is in its place in another."""
    mixed = np.asarray(numbers, np.uint64)[:, None] + np.uint64(1)
    mixed = (mixed ^ (mixed << np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    words: NDArray[np.uint64] = mixed * _FACTORS + _OFFSETS
    return words


class TorturePool:
    """Host pages in plain memory: what a store needs of a `HostPool`.

    Parameters
    ----------
    num_pages : int
    """

    geometry = GEOMETRY
    layout = LAYOUT

    def __init__(self, num_pages: int) -> None:
        raw = np.zeros(num_pages * PAGE_NBYTES + _ALIGNMENT, np.uint8)
        skew = -raw.ctypes.data % _ALIGNMENT
        self.words = raw[skew : skew + num_pages * PAGE_NBYTES].view(np.uint64).reshape(num_pages, _WORDS)
        piece = PAGE_NBYTES // _PIECES
        self._nbytes = np.full(_PIECES, piece, np.int64)
        self._starts = self.words.ctypes.data + np.arange(_PIECES) * piece

    def segment_table(self, pages: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Addresses `[n, F]` of each page's segments in stored order, and their lengths `[F]`."""
        return np.asarray(pages, np.int64)[:, None] * PAGE_NBYTES + self._starts, self._nbytes

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Do nothing: the memory lives as long as the pool."""
        yield

    def fill(self, numbers: Sequence[int]) -> None:
        """Write the content of pages, from the first page of the pool on."""
        self.words[: len(numbers)] = content(numbers)

    def blank(self, count: int) -> None:
        """Overwrite the first pages with a pattern that no page has."""
        self.words[:count] = _BLANK

    def wrong(self, numbers: Sequence[int], loaded: Sequence[object]) -> list[int]:
        """Return those of the first pages that were said to be loaded and are not what their numbers say."""
        equal = (self.words[: len(numbers)] == content(numbers)).all(axis=1)
        return [
            number
            for number, same, told in zip(numbers, equal.tolist(), loaded, strict=True)
            if told and not same
        ]
