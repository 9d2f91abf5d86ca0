"""The index of a part of an archive: what its pages are, checked against the manifest as it is read."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from hicache_tier_storage.record import KEY_MAX_NBYTES

from .documents import array_documents
from .errors import ArchiveError
from .rows import ROW, index_arrays, index_rows
from .source import Source, UnreadableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .manifest import PartFacts

_MAX_DOCUMENT_NBYTES = 1 << 20
_CACHED = 16  # chunks that stay in memory


def read_document(source: Source, name: str, most: int) -> bytes:
    """Return a file that has at most so many bytes; `UnreadableError` else."""
    nbytes = source.size(name)
    if nbytes > most:
        raise UnreadableError(f"{name} has {nbytes} bytes, more than the {most} that it may have")
    raw = np.empty(nbytes, np.uint8)
    source.read(name, 0, raw)
    return raw.tobytes()


class Recent:
    """The things read last, by number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[int, Any] = OrderedDict()

    def get(self, number: int) -> Any:  # noqa: ANN401 - whatever was put
        """Return a thing, or None."""
        with self._lock:
            if number in self._held:
                self._held.move_to_end(number)
            return self._held.get(number)

    def put(self, number: int, value: object) -> None:
        """Keep a thing until others have been read since."""
        with self._lock:
            self._held[number] = value
            if len(self._held) > _CACHED:
                self._held.popitem(last=False)


class PartIndex:
    """The index of one part.

    Attributes
    ----------
    facts : PartFacts
    """

    def __init__(self, source: Source, facts: PartFacts) -> None:
        self.facts = facts
        self._source = source
        self._chunks = Recent()
        self._token_chunks = Recent()

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
                told = json.loads(read_document(self._source, file, _MAX_DOCUMENT_NBYTES))
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

    def chunks(self) -> Iterator[tuple[int, NDArray[np.void]]]:
        """Yield the index a chunk at a time: number of the first row, rows.

        Raises
        ------
        ArchiveError
            Where a chunk is damaged.
        """
        for chunk in range(self._num_chunks):
            yield chunk * index_rows(self.facts.pages), self._chunk(chunk)

    def check_index(self) -> None:
        """Read the whole index once; raises `ArchiveError` as `chunks` does."""
        for _ in self.chunks():
            pass

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
