"""A partition as any process sees it: its files, its slot tables, and which pages they hold."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .inside import ARRAY_FILE
from .page_cipher import PageCipher
from .partition_files import remove_slab
from .record import Words, as_records, committed, keys_of
from .slab import FileCache, SlabDamagedError, StoreFile
from .table import MappedTable, SlotTables, table_nbytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .encryption import EncryptionKey
    from .partition_facts import PartitionFacts
    from .partition_files import PartitionPaths

_LOG = logging.getLogger(__name__)
_SLOTS_ANYWHERE, _SPARSE = 1 << 24, 64
"""Slots up to which slabs have any number, and how thin they may be spread beyond: a slot takes memory."""


@dataclass(slots=True)
class Pages:
    """Committed pages found in tables: slot numbers, their records, their keys."""

    slots: NDArray[np.int64]
    records: NDArray[np.void]
    keys: list[bytes] = field(default_factory=list)


class Partition:
    """Files and tables of one partition.

    Parameters
    ----------
    paths : PartitionPaths
    facts : PartitionFacts
    cache : FileCache
    writable : bool
    key : EncryptionKey, optional
        Where the pages are encrypted.

    Attributes
    ----------
    cipher : PageCipher or None
    trusted : uint64, one a slot
        Commit sequence of the page that this process wrote or verified there, 0 for none. Any other page is
        verified when it is first read.
    """

    def __init__(
        self,
        paths: PartitionPaths,
        facts: PartitionFacts,
        cache: FileCache,
        *,
        writable: bool,
        key: EncryptionKey | None = None,
    ) -> None:
        self.paths = paths
        self.facts = facts
        self.cipher = None if key is None else PageCipher(key, paths.root)
        self.writable = writable
        self.tables = SlotTables(facts.shape.slots)
        self.slabs: dict[int, StoreFile] = {}
        self.damage: list[str] = []
        self.trusted: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._cache = cache

    @property
    def name(self) -> str:
        """`<rank>-w<k>/<pool>`, for messages."""
        return f"{self.facts.rank}-w{self.facts.writer}/{self.facts.pool}"

    def map_slab(self, number: int) -> None:
        """Map the table of a slab and remember its payload file.

        Raises
        ------
        SlabDamagedError
            Where either file is missing or of a wrong size.
        """
        shape = self.facts.shape
        most = max(_SLOTS_ANYWHERE, _SPARSE * (len(self.slabs) + 1) * shape.slots)
        if (number + 1) * shape.slots > most:
            raise SlabDamagedError(f"slab {number} lies far beyond all others")
        table = StoreFile(
            self.paths.table(number),
            table_nbytes(shape.slots),
            self._cache,
            writable=self.writable,
            depth=ARRAY_FILE,
        )
        slab_path = self.paths.slab(number, self.facts.page_axes)
        slab = StoreFile(slab_path, shape.file_nbytes, self._cache, writable=self.writable, depth=ARRAY_FILE)
        mapped = MappedTable(table)  # first: a slab that is removed and made anew meanwhile outlives no table
        try:
            with slab.open(direct=False) as fd:
                self._check_tail(fd, slab)
        except BaseException as error:
            mapped.close()
            slab.forget()  # or a later slab of this name would be read through this one's descriptor
            if isinstance(error, OSError) and error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
                raise SlabDamagedError(f"{slab_path.name} is no plain file") from error
            raise
        self.tables.tables[number] = mapped
        extra = (number + 1) * shape.slots - len(self.trusted)
        if extra > 0:
            self.trusted = np.concatenate([self.trusted, np.zeros(extra, np.uint64)])
        self.trusted[number * shape.slots : (number + 1) * shape.slots] = 0
        self.slabs[number] = slab

    def _check_tail(self, fd: int, slab: StoreFile) -> None:
        tail = self.facts.shape.tail()
        if os.pread(fd, len(tail), self.facts.shape.data_nbytes) != tail:
            raise SlabDamagedError(f"{slab.path.name} has a damaged index")

    def unmap_slab(self, number: int) -> None:
        """Let go of a slab; its pages are not served any more."""
        table = self.tables.tables.pop(number, None)
        if table is not None:
            table.close()
        slab = self.slabs.pop(number, None)
        if slab is not None:
            slab.forget()

    def remove_slab_files(self, number: int) -> None:
        """Unmap a slab and unlink its files."""
        self.unmap_slab(number)
        remove_slab(self.paths.slab(number, self.facts.page_axes), self.paths.table(number))

    def report(self, what: str) -> None:
        """Say once, in the log and in `damage`, that a part was dropped."""
        line = f"{self.name}: {what}: dropped, the rest serves"
        if line not in self.damage:
            self.damage.append(line)
            _LOG.warning("%s: %s: dropped, the rest serves", self.paths.root, what)

    def committed(self, records: NDArray[np.void]) -> NDArray[np.bool_]:
        """Tell which records are those of a page of this partition."""
        return committed(records, self.facts.shape.page_nbytes, encrypted=self.facts.encrypted)

    def pages_of(self, number: int, words: Words | None = None) -> Pages:
        """Return the committed pages of a mapped slab (copies of their records); `words` is its table."""
        words = self.tables.tables[number].words.copy() if words is None else words
        records = as_records(words)
        good = self.committed(records)
        index = np.flatnonzero(good)
        kept = records if good.all() else records[good]
        return Pages(index.astype(np.int64) + number * self.facts.shape.slots, kept, keys_of(kept))

    def locate(self, slots: NDArray[np.int64]) -> tuple[list[StoreFile], NDArray[np.int64]]:
        """Return file and byte offset of each slot; `SlabDamagedError` where a slab was let go of."""
        shape = self.facts.shape
        offsets = (slots % shape.slots) * shape.stride
        slabs = self.tables.slabs_of(slots)
        try:
            if len(slabs) == 1:
                return [self.slabs[slabs[0]]] * len(slots), offsets
            return list(map(self.slabs.__getitem__, (slots // shape.slots).tolist())), offsets
        except KeyError as gone:
            raise SlabDamagedError(f"slab {gone} is not there") from gone

    def close(self) -> None:
        """Unmap everything."""
        for number in list(self.slabs):
            self.unmap_slab(number)
        self.tables.close()
