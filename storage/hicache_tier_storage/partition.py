"""A partition as any process sees it: its files, its slot tables, and which pages they hold."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.errors import FormatVersionError, StoreError
from hicache_tier.geometry import KVGeometry

from .encryption import match_key, stated_check
from .inside import ARRAY_FILE, PARTITION_FILE, read_inside, remove_inside
from .journal import Journal
from .metadata import read_attributes
from .page_cipher import PageCipher
from .record import COMMITTED, GENERATION_WORD, Words, as_records, committed, keys_of
from .slab import SLAB_TARGET_NBYTES, SLOT_ALIGNMENT, FileCache, SlabDamagedError, SlabShape, StoreFile
from .state import StateBlock
from .table import MappedTable, SlotTables, table_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from .encryption import EncryptionKey

_LOG = logging.getLogger(__name__)
_TABLE_NAME = re.compile(r"c\.(0|[1-9]\d{0,9})\.0", re.ASCII)
_LOOK_AGAIN_S = 0.1  # at a slab that cannot be read
_GRACE_S = 0.5  # what its writer is at with a slab is over by then
_LOOK_LATER_S = 1.0  # at one that was reported
_LOOKS = 4
_LOOK_S = 0.001  # at a table whose slab is missing, or whose records are being published
MAX_SLAB_NBYTES = 2 * SLAB_TARGET_NBYTES
"""Bytes of the slots of a slab of several pages: what a partition says of itself is not trusted."""
_SLOTS_ANYWHERE, _SPARSE = 1 << 24, 64
"""Slots up to which slabs have any number, and how thin they may be spread beyond: a slot takes memory."""
MAX_SLOTS = 1 << 32
"""Slots of a partition: the journal names no others."""
MAX_PAGE_NBYTES = (1 << 32) - 1
"""Bytes of a page that a record can state."""
MAX_TABLE_NBYTES = table_nbytes(MAX_SLAB_NBYTES // SLOT_ALIGNMENT)


@dataclass(frozen=True, slots=True)
class PartitionPaths:
    """Where the files of a partition lie."""

    root: Path

    @property
    def namespace(self) -> str:
        """Name of the namespace."""
        return self.root.parts[-3]

    @property
    def pages(self) -> Path:
        """Folder of the `pages` array."""
        return self.root / "pages"

    @property
    def slots(self) -> Path:
        """Folder of the slot tables."""
        return self.root / "slots"

    @property
    def state(self) -> Path:
        """The state block."""
        return self.root / "state" / "c.0"

    @property
    def lock(self) -> Path:
        """What the writer holds an exclusive flock on."""
        return self.root / "state" / "writer.lock"

    @property
    def journal(self) -> Path:
        """The change journal."""
        return self.root / "state" / "journal"

    def slab(self, number: int, page_axes: int) -> Path:
        """Payload file of a slab."""
        return self.pages / (f"c.{number}" + ".0" * page_axes)

    def table(self, number: int) -> Path:
        """Slot table of a slab."""
        return self.slots / f"c.{number}.0"

    def slab_numbers(self) -> list[int]:
        """Numbers of the slot tables there are, ascending; files of other names are ignored."""
        if not self.slots.is_dir() or self.slots.is_symlink():
            return []
        names = (_TABLE_NAME.fullmatch(entry.name) for entry in self.slots.iterdir())
        return sorted(int(name[1]) for name in names if name)


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """What a partition's attributes say of it."""

    rank: str
    writer: int
    pool: str
    capacity_nbytes: int
    geometry: KVGeometry
    page_axes: int
    shape: SlabShape
    key_check: str = ""

    @property
    def encrypted(self) -> bool:
        """Whether the pages are encrypted."""
        return bool(self.key_check)

    @classmethod
    def read(cls, paths: PartitionPaths) -> PartitionFacts:
        """Read and check `zarr.json`; raises `StoreError` or a subclass."""
        attributes = read_attributes(paths.root, PARTITION_FILE)
        try:
            geometry = KVGeometry.from_dict(attributes["geometry"])
            stride, slots = int(attributes["stride"]), int(attributes["slots_per_slab"])
            facts = cls(
                str(attributes["rank"]),
                int(attributes["writer"]),
                str(attributes["pool"]),
                int(attributes["capacity_bytes"]),
                geometry,
                int(attributes["page_axes"]),
                SlabShape(geometry.page_nbytes, stride, slots),
                stated_check(attributes, paths.root),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{paths.root}: the partition's attributes are damaged: {error!r}.") from error
        wanted = SlabShape.choose(geometry.page_nbytes, 0).stride
        large = (slots > 1 and slots * stride > MAX_SLAB_NBYTES) or geometry.page_nbytes > MAX_PAGE_NBYTES
        if stride != wanted or slots < 1 or slots & (slots - 1) or large or not 1 <= facts.page_axes <= 8:
            raise StoreError(f"{paths.root}: stride {stride} or {slots} slots a slab cannot be.")
        return facts


def remove_slab(slab: Path, table: Path) -> None:
    """Unlink a slab, then its table, so that a crash between leaves a table without payload."""
    for path in (slab, table):
        with suppress(IsADirectoryError):
            remove_inside(path, ARRAY_FILE)


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
            return [self.slabs[number] for number in (slots // shape.slots).tolist()], offsets
        except KeyError as gone:
            raise SlabDamagedError(f"slab {gone} is not there") from gone

    def close(self) -> None:
        """Unmap everything."""
        for number in list(self.slabs):
            self.unmap_slab(number)
        self.tables.close()


@dataclass(slots=True)
class _Trouble:
    """A slab that cannot be read: since when, when to look again, and why if it is mapped all the same."""

    since: float
    due: float
    why: str = ""


class ReaderPartition(Partition):
    """Another writer's partition, followed through its journal.

    Attributes
    ----------
    suspect : bool
        Every page is verified on read: a writer under another boot of this host, or on another host, did not
        close the partition, or the state block does not tell.
    held : dict
        Key of each slot that was told to hold a page.
    """

    def __init__(
        self,
        paths: PartitionPaths,
        cache: FileCache,
        *,
        boot: bytes,
        expected: KVGeometry | None = None,
        key: EncryptionKey | None = None,
    ) -> None:
        self._made = _made(paths)
        facts = PartitionFacts.read(paths)
        match_key(key, facts.key_check, paths.namespace, paths.root)
        if expected is not None and facts.geometry != expected:
            raise StoreError(f"{paths.root}: the partition holds another geometry.")
        super().__init__(paths, facts, cache, writable=False, key=key)
        self.held: dict[int, bytes] = {}
        state = self.read_state()
        self.suspect = state is None or (not state.clean and state.boot_id != boot)
        self._journal: Journal | None = None
        self._behind = True  # what the journal told was not all looked at
        self._torn: set[int] = set()
        self._scanned: dict[int, NDArray[np.uint64]] = {}
        self._troubles: dict[int, _Trouble] = {}
        self._short_of_files = False

    @property
    def followed(self) -> bool:
        """Whether a journal tells what changes, so that looking is cheap."""
        return self._journal is not None

    def replaced(self) -> bool:
        """Whether the partition was removed, or made anew, since it was opened."""
        lock, group = _made(self.paths)
        return lock is None or lock != self._made[0] or group not in {None, self._made[1]}

    def read_state(self) -> StateBlock | None:
        """Return the state block, or None where it is unreadable."""
        try:
            return StateBlock.read(self.paths.state)
        except FormatVersionError:
            raise
        except (OSError, StoreError):
            return None

    def changes(self) -> Iterator[Pages | NDArray[np.int64]]:
        """Yield what changed: `Pages` now held, and slot numbers that hold nothing any more.

        Whatever raises on the way (no descriptor is left, say), the next call looks at everything.
        """
        slots = self._told()
        behind, self._behind = self._behind, True
        if behind or slots is None:
            yield from self._scan(everything=behind or self._journal is not None)
        else:
            if self._torn:
                slots = np.union1d(slots, np.array(sorted(self._torn), np.int64))
                self._torn.clear()
            yield from self._reread(slots)
            now = time.monotonic()
            for number in [number for number, trouble in self._troubles.items() if trouble.due <= now]:
                yield from self._look_at(number, everything=True)
        self._behind = False

    def _told(self) -> NDArray[np.int64] | None:
        """Return the slots that the journal tells of; None where there is none or it cannot tell."""
        if self._journal is None:
            try:
                self._journal = Journal(self.paths.journal, writable=False)
            except OSError:
                return None
            self._behind = True
            return None
        try:
            return self._journal.changes()
        except OSError:  # cut; its writer makes it whole when it next speaks
            self._let_go_of_journal()
            self._behind = True
            return None

    def _look_again_at(self, slots: NDArray[np.int64], records: NDArray[np.void]) -> None:
        """Remember slots whose records were being published: a new access time is not in the journal."""
        self._torn.update(slots[_torn(records)].tolist())

    def _scan(self, *, everything: bool) -> Iterator[Pages | NDArray[np.int64]]:
        present = self.paths.slab_numbers()
        for number in set(self.slabs).difference(present):
            yield self.lose_slab(number)
        for number in present:
            yield from self._look_at(number, everything=everything)

    def _look_at(self, number: int, *, everything: bool) -> Iterator[Pages | NDArray[np.int64]]:
        """List a slab, mapping it where need be; without `everything` only where a generation changed."""
        if number in self.slabs:
            try:
                self.tables.tables[number].check()
            except SlabDamagedError:  # cut or replaced, or given up, and made anew perhaps
                yield self.lose_slab(number)
        looks = 0
        if number not in self.slabs:
            if not self._try_map(number):
                return
            looks = _LOOKS  # what is being published now would be missed until the next call
        elif number in self._troubles:
            self._complain(number, SlabDamagedError(self._troubles[number].why))
            return
        generations = self.tables.tables[number].words[:, GENERATION_WORD].copy()
        if not everything and np.array_equal(generations, self._scanned.get(number, ())):
            return
        self._scanned[number] = generations
        words: Words = self.tables.tables[number].words.copy()
        while looks and _torn(as_records(words)).any():
            looks -= 1
            time.sleep(_LOOK_S)
            words = self.tables.tables[number].words.copy()
        pages = self.pages_of(number, words)
        slots = np.arange(len(words)) + number * self.facts.shape.slots
        self._look_again_at(slots, as_records(words))
        yield np.setdiff1d(self._held_in(number), pages.slots)
        yield pages

    def _reread(self, slots: NDArray[np.int64]) -> Iterator[Pages | NDArray[np.int64]]:
        shift = self.facts.shape.slots
        numbers = self.tables.slabs_of(slots)
        if any(number not in self.slabs for number in numbers):
            numbers = sorted({*numbers} & {*self.slabs, *self.paths.slab_numbers()})  # it may say anything
        for number in numbers:
            mine = slots[slots // shift == number]
            if number in self._troubles or self.tables.damaged(mine):
                yield from self._look_at(number, everything=True)
                continue
            records = as_records(self.tables.gather(mine))
            good = self.committed(records)
            self._look_again_at(mine, records)
            yield mine[~good]
            kept = records[good]
            yield Pages(mine[good], kept, keys_of(kept))

    def _held_in(self, number: int) -> NDArray[np.int64]:
        first = number * self.facts.shape.slots
        return np.array([s for s in range(first, first + self.facts.shape.slots) if s in self.held], np.int64)

    def _try_map(self, number: int) -> bool:
        try:
            self.map_slab(number)
        except (SlabDamagedError, OSError) as error:
            self._complain(number, error)
            return False
        self._troubles.pop(number, None)
        return True

    def _complain(self, number: int, error: Exception) -> None:
        """Remember a slab that cannot be read, to look again; say so where that lasts.

        Its writer may be giving it up, or making it: then there is no table any more, or no page in it yet.
        """
        if not self.paths.table(number).exists():
            self._troubles.pop(number, None)
            return
        now = time.monotonic()
        trouble = self._troubles.setdefault(number, _Trouble(now, now))
        trouble.due = now + _LOOK_AGAIN_S
        if now - trouble.since < _GRACE_S or self._being_made(number):
            return
        trouble.due = now + _LOOK_LATER_S
        if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}:
            if not self._short_of_files:
                self._short_of_files = True
                _LOG.warning(
                    "%s: %s: pages are missed until there are files to be had", self.paths.root, error
                )
            return
        self.report(str(error))

    def _being_made(self, number: int) -> bool:
        """Whether there is a table without a slab, and no page was ever in it."""
        if self.paths.slab(number, self.facts.page_axes).exists():
            return False
        try:
            table = self.paths.table(number)
            return not any(read_inside(table, ARRAY_FILE, table_nbytes(self.facts.shape.slots)))
        except OSError:
            return True

    def doubt(self, number: int, why: str) -> NDArray[np.int64]:
        """Stop serving a slab whose files turned out not to be what they were; return the slots to forget.

        Whether it is damaged, or given up by its writer, or made anew, the next calls of `changes` find out.
        """
        now = time.monotonic()
        held = self._held_in(number)
        if self.tables.damaged(np.array([number * self.facts.shape.slots], np.int64)):
            self.lose_slab(number)
        self._scanned.pop(number, None)
        # A table that is still in its place stays mapped: a slab made anew has a new one.
        self._troubles.setdefault(number, _Trouble(now, now, why))
        return held

    def given_up(self, number: int) -> bool:
        """Whether a slab's table is gone, or another than was mapped, as where its writer let go of it.

        A writer takes the slab away before the table, so a slab that alone is missing is given a moment.
        """
        for _ in range(_LOOKS):
            table = self.tables.tables.get(number)
            try:
                stat = self.paths.table(number).stat()
            except FileNotFoundError:
                return True
            except OSError:
                return False
            if table is None or (stat.st_dev, stat.st_ino) != table.file.identity:
                return True
            if self.paths.slab(number, self.facts.page_axes).exists():
                return False
            time.sleep(_LOOK_S)
        return False

    def lose_slab(self, number: int) -> NDArray[np.int64]:
        """Unmap a slab; return the slots that held pages."""
        self.unmap_slab(number)
        self._scanned.pop(number, None)
        self._troubles.pop(number, None)
        return self._held_in(number)

    def close(self) -> None:
        """Unmap everything."""
        self._let_go_of_journal()
        super().close()

    def _let_go_of_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def _torn(records: NDArray[np.void]) -> NDArray[np.bool_]:
    """Tell which records are being published anew, or were when their writer was killed."""
    torn: NDArray[np.bool_] = (records["generation"] & 1 == 1) & (records["state"] == COMMITTED)
    return torn


def _made(paths: PartitionPaths) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return what tells the writer lock and the partition's group from files of the same name made later."""
    lock, group = _stat(paths.lock), _stat(paths.root / "zarr.json")
    return (
        None if lock is None else (lock.st_dev, lock.st_ino),  # its times are its writer's to set
        None if group is None else (group.st_dev, group.st_ino, group.st_ctime_ns),  # inodes are used again
    )


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
