"""How an archive compresses pages: each page is one Zarr chunk, coded alone."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from hicache_tier.named import Named

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_BLOSC_HEADER_NBYTES = 16
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_OVERHEAD_NBYTES = 1 << 12  # what a coder may add to a page that it cannot compress, at least


class PageDamagedError(Exception):
    """The coded bytes of a page are not what its codec writes."""


class Codec(Named):
    """Codecs of an archive; each value is the name that a user gives."""

    NONE = "none"
    FAST = "fast"
    SMALL = "small"
    ZSTD = "zstd"

    @classmethod
    def _noun(cls) -> str:
        return "codec"

    def documents(self, itemsize: int) -> list[dict[str, Any]]:
        """Codecs of the inner chunks as Zarr metadata states them."""
        plain: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
        return [plain, *_compressors(self, itemsize)]

    def most_nbytes(self, page_nbytes: int) -> int:
        """Bytes that a coded page has at most."""
        if self is Codec.NONE:
            return page_nbytes
        return page_nbytes + max(_OVERHEAD_NBYTES, page_nbytes // 64)

    def encoder(self, itemsize: int) -> Callable[[NDArray[Any]], bytes | NDArray[Any]]:
        """Return what codes one page, uint8 `[page_nbytes]`; safe to call from several threads."""
        if self is Codec.NONE:
            return lambda page: page
        coder = _coder(self)
        dtype = f"u{itemsize}"

        def encode(page: NDArray[Any]) -> bytes:
            typed = page.view(dtype) if len(page) % itemsize == 0 else page
            return bytes(coder.encode(typed))

        return encode

    def decode(self, coded: memoryview, page: NDArray[Any]) -> None:
        """Fill `page`, uint8 `[page_nbytes]`, from its coded bytes.

        Raises
        ------
        PageDamagedError
            Where they are of another length, or state that they hold one: nothing is allocated by it.
        """
        if self is Codec.NONE:
            if len(coded) != len(page):
                raise PageDamagedError(f"it has {len(coded)} bytes instead of {len(page)}")
            page.data[:] = coded
            return
        told = _zstd_content(coded) if self is Codec.ZSTD else _blosc_content(coded)
        if told != len(page):
            raise PageDamagedError(f"its {self.value} header says {told} bytes instead of {len(page)}")
        try:
            _coder(self).decode(coded, page)
        except (RuntimeError, ValueError) as error:
            raise PageDamagedError(f"{self.value} cannot decode it: {error}") from error


def _compressors(codec: Codec, itemsize: int) -> list[dict[str, Any]]:
    if codec is Codec.NONE:
        return []
    if codec is Codec.ZSTD:
        return [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
    cname, level, shuffle = _BLOSC[codec]
    settings = {"cname": cname, "clevel": level, "shuffle": shuffle, "typesize": itemsize, "blocksize": 0}
    return [{"name": "blosc", "configuration": settings}]


_BLOSC = {Codec.FAST: ("lz4", 5, "bitshuffle"), Codec.SMALL: ("zstd", 3, "shuffle")}


def _coder(codec: Codec) -> Any:  # noqa: ANN401 - numcodecs has no types
    import numcodecs

    if codec is Codec.ZSTD:
        return numcodecs.Zstd(level=1)
    cname, level, shuffle = _BLOSC[codec]
    modes = {"bitshuffle": numcodecs.Blosc.BITSHUFFLE, "shuffle": numcodecs.Blosc.SHUFFLE}
    return numcodecs.Blosc(cname=cname, clevel=level, shuffle=modes[shuffle])


def _blosc_content(coded: memoryview) -> int:
    """Bytes that a Blosc 1 frame says it holds."""
    if len(coded) < _BLOSC_HEADER_NBYTES:
        raise PageDamagedError(f"it has {len(coded)} bytes, less than a Blosc header")
    held, _, frame = struct.unpack_from("<III", coded, 4)
    if frame != len(coded):
        raise PageDamagedError(f"its Blosc header says {frame} coded bytes instead of {len(coded)}")
    return int(held)


def _zstd_content(coded: memoryview) -> int:
    """Bytes that a Zstandard frame says it holds (RFC 8878, 3.1.1.1)."""
    if bytes(coded[:4]) != _ZSTD_MAGIC or len(coded) < 6:
        raise PageDamagedError("it is no Zstandard frame")
    descriptor = coded[4]
    single = descriptor >> 5 & 1
    width = (single, 2, 4, 8)[descriptor >> 6]
    at = 5 + (0 if single else 1) + (0, 1, 2, 4)[descriptor & 3]
    if not width or len(coded) < at + width:
        raise PageDamagedError("its Zstandard frame does not say how many bytes it holds")
    return int.from_bytes(coded[at : at + width], "little") + (256 if width == 2 else 0)
