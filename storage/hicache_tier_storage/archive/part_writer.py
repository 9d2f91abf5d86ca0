"""The index and the documents of a part, once all its shards are in place."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from hicache_tier_storage.record import keys_of

from .documents import array_documents, group_document, part_document
from .errors import ArchiveError
from .manifest import PartFacts
from .rows import NO_TOKEN, ROW, index_arrays, index_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .codecs import Codec
    from .destination import Destination
    from .published import PublishedShards
    from .stores import PartSource

    Tokens = dict[bytes, NDArray[np.uint32]]


class PartWriter:
    """Writes what a part holds beside its shards; memory for one chunk of the index.

    Parameters
    ----------
    destination : Destination
    part : PartSource
    codec : Codec
    capacity : int
        Pages a shard.
    has_tokens : bool
        Whether the index holds token ids.
    """

    def __init__(
        self, destination: Destination, part: PartSource, codec: Codec, capacity: int, has_tokens: bool
    ) -> None:
        self._destination = destination
        self._part = part
        self._codec = codec
        self._capacity = capacity
        self._has_tokens = has_tokens

    def write(self, published: PublishedShards, tokens: Tokens) -> PartFacts:
        """Write index arrays and documents; return what the manifest says."""
        part, pages = self._part, sum(published.counts)
        facts = PartFacts(
            part.name,
            part.geometry,
            part.layout,
            self._codec,
            pages,
            self._capacity,
            published.stored_nbytes,
            self._has_tokens,
        )
        if not pages:
            return facts
        pending = np.zeros(0, ROW)
        chunk, step = 0, index_rows(pages)
        for number in range(len(published.counts)):
            pending = np.concatenate([pending, self._rows(published, number)])
            while len(pending) >= step:
                self._index_chunk(facts, chunk, pending[:step], tokens)
                pending, chunk = pending[step:], chunk + 1
        if len(pending):
            self._index_chunk(facts, chunk, pending, tokens)
        self._documents(facts)
        return facts

    @staticmethod
    def _rows(published: PublishedShards, number: int) -> NDArray[np.void]:
        rows = published.rows(number)
        if rows is None:
            raise ArchiveError(f"{published.shard(number)} was changed while the export was under way.")
        return rows

    def _index_chunk(self, facts: PartFacts, chunk: int, rows: NDArray[np.void], tokens: Tokens) -> None:
        step = index_rows(facts.pages)
        for array in index_arrays(facts.index_tokens):
            shape = (step, array.width) if array.width else (step,)
            values = np.full(shape, array.fill_value, array.dtype)
            if array.name == "token_ids":
                none = np.full(array.width, NO_TOKEN, np.uint32)
                values[: len(rows)] = [tokens.get(key, none) for key in keys_of(rows)]
            else:
                values[: len(rows)] = rows[array.name]
            raw = values.tobytes()
            name = f"c.{chunk}" + (".0" if array.width else "")
            crc = int(google_crc32c.value(raw)).to_bytes(4, "little")
            self._destination.put(f"{facts.name.path}/{array.name}/{name}", raw + crc)

    def _documents(self, facts: PartFacts) -> None:
        for name, document in array_documents(facts).items():
            self._put(f"{facts.name.path}/{name}", document)
        self._put(facts.name.path, part_document(facts))
        self._put(f"{facts.name.namespace}/{facts.name.rank}", group_document())
        self._put(facts.name.namespace, group_document(self._part.identity))

    def _put(self, folder: str, document: dict[str, Any]) -> None:
        raw = json.dumps(document, indent=1, sort_keys=True).encode()
        self._destination.put(f"{folder}/zarr.json", raw)
