"""Another writer's partition, as it changes."""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.errors import FormatVersionError, StoreError

from .encryption import match_key
from .inside import ARRAY_FILE, read_inside
from .journal import Journal
from .partition import Pages, Partition
from .partition_facts import PartitionFacts
from .record import COMMITTED, GENERATION_WORD, Words, as_records, keys_of
from .slab import SlabDamagedError
from .state import StateBlock
from .table import table_nbytes

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from hicache_tier.geometry import KVGeometry

    from .encryption import EncryptionKey
    from .partition_files import PartitionPaths
    from .slab import FileCache

_LOG = logging.getLogger(__name__)
_LOOK_AGAIN_S = 0.1  # at a slab that cannot be read
_GRACE_S = 0.5  # what its writer is at with a slab is over by then
_LOOK_LATER_S = 1.0  # at one that was reported
_LOOKS = 4
_LOOK_S = 0.001  # at a table whose slab is missing, or whose records are being published


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
