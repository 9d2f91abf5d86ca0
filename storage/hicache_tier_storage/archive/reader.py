"""`open_archive`: an archive whose every page is checked as it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import google_crc32c
import numpy as np
import xxhash

from hicache_tier_storage.record import checksum_seed, keys_of

from .codecs import Codec, PageDamagedError
from .documents import MANIFEST, shard_name
from .errors import NotAnArchiveError
from .manifest import MAX_MANIFEST_NBYTES, Manifest, parse_manifest
from .part_index import PartIndex, Recent, read_document
from .places import Place
from .shard import index_nbytes
from .source import Source, UnreadableError, open_source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from .manifest import PartFacts

_MAX_DOCUMENT_NBYTES = 1 << 20
_CACHED = 16  # chunks of the index, and shards' indices, that stay in memory
_READ_NBYTES = 4 << 20


class Archive:
    """A finished archive; make one with `open_archive`. A context manager.

    Attributes
    ----------
    place : Place
    manifest : Manifest
    parts : tuple of ArchivePart
    """

    def __init__(self, place: Place, source: Source, manifest: Manifest) -> None:
        self.place = place
        self.manifest = manifest
        self.parts = tuple(ArchivePart(source, facts) for facts in manifest.parts)
        self._source = source

    def close(self) -> None:
        """Let go of what is open."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        pages = sum(part.facts.pages for part in self.parts)
        return f"Archive({self.place.text!r}, {len(self.parts)} parts, {pages} pages)"


def open_archive(place: str | Path | Place) -> Archive:
    """Open an archive and check its manifest and documents; pages are checked when they are read.

    Raises
    ------
    NotAnArchiveError
        Where there is none, or one that is not finished.
    FormatVersionError
        Where it is of a later version.
    ArchiveError
        Naming the first thing that is not what an export writes.
    """
    place = Place.parse(place)
    source = open_source(place)
    try:
        try:
            raw = read_document(source, MANIFEST, MAX_MANIFEST_NBYTES)
        except UnreadableError as error:
            raise NotAnArchiveError(f"{place.text} is no finished archive: {error}.") from error
        archive = Archive(place, source, parse_manifest(raw, place.text))
        for part in archive.parts:
            part.check()
    except BaseException:
        source.close()
        raise
    return archive


class ArchivePart(PartIndex):
    """Pages of one rank and pool of an archive.

    Attributes
    ----------
    facts : PartFacts
    """

    def __init__(self, source: Source, facts: PartFacts) -> None:
        super().__init__(source, facts)
        self._shards = Recent()

    def read_pages(
        self, numbers: NDArray[np.int64], out: NDArray[np.uint8], keys: list[bytes] | None = None
    ) -> list[str]:
        """Read pages into `out`, uint8 `[n, page_nbytes]`; return "" or what is wrong for each.

        Parameters
        ----------
        numbers : int64 [n]
            Rows of the index. Neighbours in a shard are read in one go.
        out : uint8 [n, page_nbytes]
        keys : list of bytes, optional
            What the pages must be; by the index where not given.
        """
        rows = self.rows(numbers)
        names = keys_of(rows) if keys is None else keys
        reasons = [""] * len(numbers)
        for first, last in self._runs(numbers):
            shard, at = divmod(int(numbers[first]), self.facts.shard)
            try:
                offsets, lengths = self._shard_index(shard)
            except UnreadableError as error:
                reasons[first:last] = [f"damaged: {error}"] * (last - first)
                continue
            part = slice(at, at + last - first)
            reasons[first:last] = self._read_run(shard, offsets[part], lengths[part], out[first:last])
        sums = rows["checksum"].tolist()
        for at, key in enumerate(names):
            if not reasons[at] and xxhash.xxh3_64_intdigest(out[at], checksum_seed(key)) != sums[at]:
                reasons[at] = "checksum"
        return reasons

    def _runs(self, numbers: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Cut rows into runs of neighbours of one shard, bounded in bytes."""
        most = max(1, _READ_NBYTES // self.facts.geometry.page_nbytes)
        first = 0
        for at in range(1, len(numbers) + 1):
            if (
                at == len(numbers)
                or numbers[at] != numbers[at - 1] + 1
                or numbers[at] // self.facts.shard != numbers[first] // self.facts.shard
                or at - first >= most
            ):
                yield first, at
                first = at

    def _read_run(
        self, shard: int, offsets: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> list[str]:
        """Read neighbouring pages of a shard, in one go where nothing lies between them."""
        file, codec, start = self._shard_file(shard), self.facts.codec, int(offsets[0])
        gapless = bool((offsets[1:] == offsets[:-1] + lengths[:-1]).all())
        try:
            if gapless and codec is Codec.NONE:
                self._source.read(file, start, out.reshape(-1))
                return [""] * len(out)
            coded = np.empty(int(lengths.sum()) if gapless else 0, np.uint8)
            self._source.read(file, start, coded)
        except UnreadableError as error:
            return [f"damaged: {error}"] * len(out)
        reasons = []
        for i, (offset, nbytes) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
            try:
                if gapless:
                    piece = coded[offset - start : offset - start + nbytes]
                else:
                    piece = np.empty(nbytes, np.uint8)
                    self._source.read(file, offset, piece)
                codec.decode(piece.data, out[i])
            except (UnreadableError, PageDamagedError) as error:
                reasons.append(f"damaged: {error}")
            else:
                reasons.append("")
        return reasons

    def _shard_file(self, shard: int) -> str:
        return f"{self.facts.name.path}/pages/{shard_name(shard, self.facts.page_axes)}"

    def _shard_index(self, shard: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return offset and length of each page of a shard; `UnreadableError` where they cannot be."""
        found: tuple[NDArray[np.int64], NDArray[np.int64]] | None = self._shards.get(shard)
        if found is None:
            found = self._check_shard(shard)
            self._shards.put(shard, found)
        return found

    def _check_shard(self, shard: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        facts, file = self.facts, self._shard_file(shard)
        payload = self._source.size(file) - index_nbytes(facts.shard)
        count = min(facts.shard, facts.pages - shard * facts.shard)
        if payload < 0:
            raise UnreadableError(f"{file} is cut")
        raw = np.empty(index_nbytes(facts.shard), np.uint8)
        self._source.read(file, payload, raw)
        if google_crc32c.value(raw[:-4].tobytes()) != int.from_bytes(raw[-4:].tobytes(), "little"):
            raise UnreadableError(f"{file} is cut or damaged: its index has a wrong CRC32C")
        pairs = raw[:-4].view("<u8").reshape(-1, 2)[:count]
        most = np.uint64(facts.codec.most_nbytes(facts.geometry.page_nbytes))
        offsets, lengths = pairs[:, 0], pairs[:, 1]
        inside = (lengths <= most) & (lengths <= payload) & (lengths > 0)
        if not inside.all() or not (offsets <= np.uint64(payload) - lengths).all():
            raise UnreadableError(f"{file}: its index points outside of the file")
        if float(lengths.astype(np.float64).sum()) > payload:
            raise UnreadableError(f"{file}: its index names the same bytes twice")
        return offsets.astype(np.int64), lengths.astype(np.int64)
