"""`open_archive`: an archive whose every page is checked as it is read."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Self

import google_crc32c
import numpy as np
import xxhash

from hicache_tier_storage.record import KEY_MAX_NBYTES, checksum_seed, keys_of

from .codecs import Codec, PageDamagedError
from .destination import MANIFEST
from .documents import array_documents, shard_name
from .errors import ArchiveError, NotAnArchiveError
from .manifest import MAX_MANIFEST_NBYTES, Manifest, parse_manifest
from .places import Place
from .rows import ROW, index_arrays, index_rows
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
            raw = _read_document(source, MANIFEST, MAX_MANIFEST_NBYTES)
        except UnreadableError as error:
            raise NotAnArchiveError(f"{place.text} is no finished archive: {error}.") from error
        archive = Archive(place, source, parse_manifest(raw, place.text))
        for part in archive.parts:
            part.check()
    except BaseException:
        source.close()
        raise
    return archive


def _read_document(source: Source, name: str, most: int) -> bytes:
    nbytes = source.size(name)
    if nbytes > most:
        raise UnreadableError(f"{name} has {nbytes} bytes, more than the {most} that it may have")
    raw = np.empty(nbytes, np.uint8)
    source.read(name, 0, raw)
    return raw.tobytes()


class _Recent:
    """The things read last, by number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[int, Any] = OrderedDict()

    def get(self, number: int) -> Any:  # noqa: ANN401 - whatever was put
        with self._lock:
            if number in self._held:
                self._held.move_to_end(number)
            return self._held.get(number)

    def put(self, number: int, value: object) -> None:
        with self._lock:
            self._held[number] = value
            if len(self._held) > _CACHED:
                self._held.popitem(last=False)


class ArchivePart:
    """Pages of one rank and pool of an archive.

    Attributes
    ----------
    facts : PartFacts
    """

    def __init__(self, source: Source, facts: PartFacts) -> None:
        self.facts = facts
        self._source = source
        self._chunks = _Recent()
        self._token_chunks = _Recent()
        self._shards = _Recent()

    def check(self) -> None:
        """Compare documents and sizes of the index with the manifest.

        Raises
        ------
        ArchiveError
            Naming the first that differs.
        """
        facts = self.facts
        try:
            for name, document in array_documents(facts).items():
                file = f"{facts.name.path}/{name}/zarr.json"
                told = json.loads(_read_document(self._source, file, _MAX_DOCUMENT_NBYTES))
                wrong = sorted(key for key, value in document.items() if told.get(key) != value)
                if wrong:
                    raise ArchiveError(f"{file} is not what the manifest says: {', '.join(wrong)}.")
            for array in index_arrays(facts.index_tokens):
                wanted = index_rows(facts.pages) * array.row_nbytes() + 4
                for chunk in range(self._num_chunks):
                    file = self._index_file(array.name, bool(array.width), chunk)
                    nbytes = self._source.size(file)
                    if nbytes != wanted:
                        raise ArchiveError(f"{file} has {nbytes} bytes instead of {wanted}.")
        except UnreadableError as error:
            raise ArchiveError(f"{error}.") from error
        except (ValueError, AttributeError, RecursionError) as error:
            raise ArchiveError(f"{file} is not what an export writes: {error}.") from error

    @property
    def _num_chunks(self) -> int:
        return -(-self.facts.pages // index_rows(self.facts.pages))

    def _index_file(self, name: str, wide: bool, chunk: int) -> str:
        return f"{self.facts.name.path}/{name}/c.{chunk}" + (".0" if wide else "")

    # -- the index -------------------------------------------------------------------------------------

    def chunks(self) -> Iterator[tuple[int, NDArray[np.void]]]:
        """Yield the index a chunk at a time: number of the first row, rows.

        Raises
        ------
        ArchiveError
            Where a chunk is damaged.
        """
        for chunk in range(self._num_chunks):
            yield chunk * index_rows(self.facts.pages), self._chunk(chunk)

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.void]:
        """Return rows by number."""
        return self._gather(numbers, self._chunk, np.zeros(len(numbers), ROW))

    def token_ids(self, numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the token ids of pages, uint32 `[n, page_tokens]`; `NO_TOKEN` where they are not known."""
        out = np.zeros((len(numbers), self.facts.geometry.page_tokens), np.uint32)
        return self._gather(numbers, self._token_chunk, out)

    def _gather(self, numbers: NDArray[np.int64], load: Any, out: NDArray[Any]) -> NDArray[Any]:  # noqa: ANN401
        step = index_rows(self.facts.pages)
        owner = numbers // step
        for chunk in np.unique(owner).tolist():
            where = owner == chunk
            out[where] = load(chunk)[numbers[where] - chunk * step]
        return out

    def _chunk(self, chunk: int) -> NDArray[np.void]:
        found: NDArray[np.void] | None = self._chunks.get(chunk)
        if found is None:
            count = min(index_rows(self.facts.pages), self.facts.pages - chunk * index_rows(self.facts.pages))
            found = np.zeros(count, ROW)
            for array in index_arrays(None):
                found[array.name] = self._column(array.name, array.dtype, array.width, chunk)[:count]
            lengths = found["key_nbytes"]
            if count and not 1 <= int(lengths.min()) <= int(lengths.max()) <= KEY_MAX_NBYTES:
                raise ArchiveError(f"{self.facts.name}: the index has keys of impossible lengths.")
            self._chunks.put(chunk, found)
        return found

    def _token_chunk(self, chunk: int) -> NDArray[np.uint32]:
        found: NDArray[np.uint32] | None = self._token_chunks.get(chunk)
        if found is None:
            found = self._column("token_ids", "uint32", self.facts.geometry.page_tokens, chunk)
            self._token_chunks.put(chunk, found)
        return found

    def _column(self, name: str, dtype: str, width: int, chunk: int) -> NDArray[Any]:
        """Read and check one chunk of an index array; its size was checked when the archive was opened."""
        file = self._index_file(name, bool(width), chunk)
        rows = index_rows(self.facts.pages)
        raw = np.empty(rows * max(1, width) * np.dtype(dtype).itemsize + 4, np.uint8)
        try:
            self._source.read(file, 0, raw)
        except UnreadableError as error:
            raise ArchiveError(f"{error}.") from error
        body = raw[:-4]
        if google_crc32c.value(body.tobytes()) != int.from_bytes(raw[-4:].tobytes(), "little"):
            raise ArchiveError(f"{file} is damaged: its CRC32C is wrong.")
        values = body.view(np.dtype(dtype).newbyteorder("<"))
        return values.reshape(rows, width) if width else values

    # -- pages -----------------------------------------------------------------------------------------

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
