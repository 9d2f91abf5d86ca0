"""What `bench storage` measures: sizes of pages, and the ways in which they move."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Self

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import KVGeometry, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .page_cache import Cache

DEFAULT = ("256x2MiB", "2048x64KiB")
SWEEP = ("2048x64KiB", "512x256KiB", "128x1MiB", "32x4MiB", "8x16MiB")
"""128 MiB in pages of 64 KiB to 16 MiB."""

_HEAD_DIM, _KV_HEADS, _PAGE_TOKENS = 128, 4, 8


@dataclass(frozen=True, slots=True)
class StorageCase:
    """One size of page: how many, and how many bytes each (a multiple of 64 KiB for bfloat16 pages)."""

    pages: int
    page_nbytes: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `PAGESxSIZE`, such as `256x2MiB`.

        Raises
        ------
        InvalidArgumentError
            For any other text, and for a size that no page of `geometry` has.
        """
        from humanfriendly import InvalidSize, parse_size

        count, _, nbytes = text.partition("x")
        try:
            pages, page_nbytes = int(count), int(parse_size(nbytes, binary=True))
        except (ValueError, InvalidSize) as error:
            raise InvalidArgumentError(f"{text!r} is not PAGESxSIZE such as 256x2MiB") from error
        case = cls(positive(f"{text!r}: pages", pages), positive(f"{text!r}: size", page_nbytes))
        assert case.geometry.page_nbytes == page_nbytes  # noqa: S101 - building it checks the size
        return case

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.page_nbytes

    @property
    def geometry(self) -> KVGeometry:
        """An MHA geometry whose pages have this size."""
        layer_nbytes = 2 * _KV_HEADS * _HEAD_DIM * 2 * _PAGE_TOKENS
        layers, rest = divmod(self.page_nbytes, layer_nbytes)
        if rest or not layers:
            raise InvalidArgumentError(
                f"page size {self.page_nbytes} is not a multiple of {layer_nbytes} bytes."
            )
        return KVGeometry.mha(
            num_layers=layers,
            num_kv_heads=_KV_HEADS,
            head_dim=_HEAD_DIM,
            dtype="bfloat16",
            page_tokens=_PAGE_TOKENS,
        )


@dataclass(frozen=True, slots=True)
class StorageShape:
    """One way of moving the pages of a case.

    Attributes
    ----------
    case : StorageCase
    mode : str
        `direct` (O_DIRECT) or `buffered`.
    cache : Cache
        What the page cache has to do with it.
    checksums : bool
        Stored with each page, and verified on every read.
    threads : int
        I/O threads.
    depth : int
        Pages that one call is given at once: the queue depth that a request offers.
    layout : str
        Of the host pool.
    encrypted : bool
        Pages are encrypted on the way, and authenticated on every read.
    """

    case: StorageCase
    mode: str
    cache: Cache
    checksums: bool
    threads: int
    depth: int
    layout: str = "page_first"
    encrypted: bool = False

    @property
    def bare(self) -> bool:
        """Whether the store does nothing but move bytes: what peers without checksums compare with."""
        return not self.checksums

    def as_row(self) -> dict[str, object]:
        """Return what tells this shape's rows from others."""
        return {
            "page_nbytes": self.case.page_nbytes,
            "pages": self.case.pages,
            "mode": self.mode,
            "cache": self.cache.value,
            "checksums": self.checksums,
            "encrypted": self.encrypted,
            "threads": self.threads,
            "depth": self.depth,
        }


def shapes(
    cases: Sequence[StorageCase],
    ways: Sequence[tuple[str, Cache]],
    threads: Sequence[int],
    depths: Sequence[int],
    layout: str,
    *,
    encrypted: bool = False,
) -> list[StorageShape]:
    """Return the shapes of a product; a depth above a case's pages is all of its pages, once.

    Each is measured without checksums, with them, and where that is asked for `encrypted`.
    """
    kinds = [(False, False), (True, False), *([(True, True)] if encrypted else [])]
    found = [
        StorageShape(case, mode, cache, sums, workers, min(depth, case.pages), layout, secret)
        for case, (mode, cache), workers, depth, (sums, secret) in product(
            cases, ways, threads, depths, kinds
        )
    ]
    return list(dict.fromkeys(found))
