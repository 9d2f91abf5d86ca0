"""Publishing the records of the partition that this process writes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from .record import COMMITTED, FLAG_PINNED, FREE, as_records, as_words, new_records, seal
from .slab import SlabDamagedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .journal import Journal
    from .partition import Partition

_REPUBLISHED_AT_ONCE = 64


def complete(records: NDArray[np.void], odd: NDArray[np.uint64], state: int = COMMITTED) -> None:
    """Fill in what records say last: state, generation (`odd` while they are written), CRC."""
    records["state"] = state
    records["generation"] = odd + np.uint64(1)
    seal(records)


class Publisher:
    """Puts records into the tables of a partition, so that other processes see them whole.

    Parameters
    ----------
    partition : Partition
    journal : Journal
    """

    def __init__(self, partition: Partition, journal: Journal) -> None:
        self._partition, self._journal = partition, journal

    def publish(self, slots: NDArray[np.int64], records: NDArray[np.void], odd: NDArray[np.uint64]) -> None:
        """Complete records and store them. Needs no lock for slots that are pinned."""
        complete(records, odd)
        self.publish_complete(slots, records)

    def publish_complete(self, slots: NDArray[np.int64], records: NDArray[np.void]) -> None:
        """Store records that are complete: from now on their pages are there."""
        self._partition.tables.publish(slots, as_words(records))

    def publish_free(self, slots: NDArray[np.int64]) -> None:
        """Store records that say that there is no page, and tell other processes."""
        if not len(slots):
            return
        tables = self._partition.tables
        odd = tables.mark_writing(slots)
        records = new_records(len(slots))
        complete(records, odd, FREE)
        tables.publish(slots, as_words(records))
        self._journal.append(slots)

    def republish(
        self, slots: NDArray[np.int64], used: NDArray[np.uint64], pinned: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Publish records anew with times of use and flags as they are now; return the slots that were.

        A few at a time: while they are being published, other processes must look again, and a kill leaves
        them to be told good by their checksums.

        Parameters
        ----------
        slots : int64 [n]
        used : uint64, one a slot
        pinned : bool, one a slot
        """
        partition, done = self._partition, [slots[:0]]
        for at in range(0, len(slots), _REPUBLISHED_AT_ONCE):
            part = slots[at : at + _REPUBLISHED_AT_ONCE]
            if partition.tables.damaged(part):
                continue  # whoever reads them next drops the slab
            records = as_records(partition.tables.gather(part))
            good = partition.committed(records)
            part, records = part[good], records[good]
            if not len(part):
                continue
            records["access_s"] = used[part]
            flags = records["flags"] & ~np.uint32(FLAG_PINNED)
            records["flags"] = flags | np.where(pinned[part], np.uint32(FLAG_PINNED), np.uint32(0))
            self.publish(part, records, partition.tables.mark_writing(part))
            done.append(part)
        return np.concatenate(done)

    def copy(self, slot: int, target: int) -> bool:
        """Copy a page to a free slot and publish it there; False where that failed."""
        partition = self._partition
        nbytes = partition.facts.shape.page_nbytes
        old, new = np.array([slot], np.int64), np.array([target], np.int64)
        files, offsets = partition.locate(np.array([slot, target], np.int64))
        if partition.tables.damaged(np.array([slot, target], np.int64)):
            return False
        records = as_records(partition.tables.gather(old))
        odd = partition.tables.mark_writing(new)
        try:
            with files[0].open(direct=False) as fd:
                payload: bytes | bytearray = os.pread(fd, nbytes, int(offsets[0]))
            whole = len(payload) == nbytes and bool(partition.committed(records).all())
            if whole and partition.cipher is not None:
                payload = bytearray(payload)
                whole = partition.cipher.reseal(records, slot, target, odd, memoryview(payload))
            with files[1].open(direct=False) as fd:
                whole = whole and os.pwrite(fd, payload, int(offsets[1])) == nbytes
        except (OSError, SlabDamagedError):
            whole = False
        if whole:
            self.publish(new, records, odd)
            self._journal.append(new)
        return whole
