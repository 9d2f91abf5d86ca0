"""Host pages without torch, and page contents that follow from the key, so that any mix-up is seen."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from hicache_tier.geometry import KVGeometry

_ALIGNMENT = 4096


class Segmented(Protocol):
    """Pages whose pieces can be found: a `HostPool` or an `ArrayPool`."""

    def segments(self, pages: Any) -> list[list[tuple[int, int]]]:  # noqa: ANN401 - pools differ
        """Address and length of each page's pieces, in stored order."""


@runtime_checkable
class Paged(Protocol):
    """Pages that are read and written whole: a `BytePool`."""

    def write_page(self, page: int, data: bytes) -> None:
        """Put a page's bytes, in stored order, where the pool has them."""

    def read_page(self, page: int) -> bytes:
        """Return a page's bytes in stored order."""


AnyPages = Segmented | Paged


class ArrayPool:
    """Host pages in plain memory: what a store needs of a `HostPool`, for processes without torch.

    Parameters
    ----------
    geometry : KVGeometry
    layout : Layout or str
    num_pages : int
    shift : int
        Bytes by which the first page lies beside a multiple of 4096.
    """

    def __init__(self, geometry: KVGeometry, layout: Layout | str, num_pages: int, *, shift: int = 0) -> None:
        self.geometry = geometry
        self.layout = Layout.parse(layout)
        self.num_pages = num_pages
        starts, total = [], shift
        for component in geometry.components:
            starts.append(total)
            total += -(-geometry.component_nbytes(component) * num_pages // _ALIGNMENT) * _ALIGNMENT
        self._memory = mmap.mmap(-1, total)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        fragments = self.layout.fragments(geometry, num_pages)
        self._first = np.array([base + starts[f.component] + f.offset for f in fragments], np.int64)
        self._steps = np.array([f.page_stride for f in fragments], np.int64)
        self._nbytes = np.array([f.nbytes for f in fragments], np.int64)

    def segment_table(self, pages: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Addresses `[n, F]` of each page's segments in stored order, and their lengths `[F]`."""
        numbers = np.asarray(pages, np.int64)
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.num_pages:
            raise InvalidArgumentError(f"pages must be 0..{self.num_pages - 1}, got {numbers.tolist()}.")
        return numbers[:, None] * self._steps + self._first, self._nbytes

    def segments(self, pages: Any) -> list[list[tuple[int, int]]]:  # noqa: ANN401 - as of HostPool
        """Address and length of each page's pieces, in stored order."""
        addresses, nbytes = self.segment_table(pages)
        return [list(zip(row, nbytes.tolist(), strict=True)) for row in addresses.tolist()]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Do nothing: the memory lives as long as the pool."""
        yield


def key_of(number: int, salt: str = "") -> bytes:
    """Key of test page `number`: 32 bytes."""
    return hashlib.sha256(f"{salt}/{number}".encode()).digest()


def keys_of(salt: str, count: int, first: int = 0) -> list[bytes]:
    """Keys of test pages `first..first+count-1`."""
    return [key_of(number, salt) for number in range(first, first + count)]


def page_bytes(key: bytes, nbytes: int) -> bytes:
    """Payload of the page with this key: incompressible, and different for every key."""
    words = np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
    return words.bytes(nbytes)


def write_page(host: AnyPages, page: int, data: bytes) -> None:
    """Put a page's bytes, in stored order, where the pool has them."""
    if isinstance(host, Paged):
        host.write_page(page, data)
        return
    at = 0
    for address, nbytes in host.segments([page])[0]:
        ctypes.memmove(address, data[at : at + nbytes], nbytes)
        at += nbytes


def read_page(host: AnyPages, page: int) -> bytes:
    """Return a page's bytes in stored order."""
    if isinstance(host, Paged):
        return host.read_page(page)
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in host.segments([page])[0])


def fill_pages(host: AnyPages, pages: Sequence[int], keys: Sequence[bytes], nbytes: int) -> None:
    """Write the content of each key into its page."""
    for page, key in zip(pages, keys, strict=True):
        write_page(host, page, page_bytes(key, nbytes))


def blank_pages(host: AnyPages, pages: Sequence[int], nbytes: int) -> None:
    """Overwrite pages with a pattern that no key has."""
    for page in pages:
        write_page(host, page, b"\xa5" * nbytes)


def pages_equal(host: AnyPages, pages: Sequence[int], keys: Sequence[bytes], nbytes: int) -> list[bool]:
    """Tell for each page whether it holds the content of its key."""
    return [read_page(host, page) == page_bytes(key, nbytes) for page, key in zip(pages, keys, strict=True)]
