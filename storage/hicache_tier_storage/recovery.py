"""What a writer finds in the partition that it opens: the state it was left in, and the pages to keep."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from hicache_tier.errors import FormatVersionError, StoreError

from .inside import ARRAY_FILE, read_inside
from .partition_facts import MAX_TABLE_NBYTES
from .record import (
    AES_256_GCM,
    CHECKSUM_NONE,
    CHECKSUM_XXH3,
    COMMITTED,
    GENERATION_WORD,
    KEY_MAX_NBYTES,
    RECORD_VERSION,
    as_records,
    as_words,
    checksum_seed,
    keys_of,
    new_records,
    seal,
)
from .slab import SlabDamagedError, SlabShape
from .state import StateBlock, boot_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .partition import Pages, Partition
    from .partition_files import PartitionPaths


def opened_state(
    paths: PartitionPaths, shape: SlabShape, capacity: int
) -> tuple[StateBlock, bytes | None, str]:
    """Return this opening's state block.

    Returns
    -------
    (state, suspect_boot, trouble)
        `suspect_boot` is the boot id to keep on disk while pages written under it are unverified, or None;
        `trouble` says why the old block could not be read, or "".
    """
    boot = boot_id()
    fresh = StateBlock(
        uuid.uuid4().bytes,
        boot,
        os.getpid(),
        0,
        True,
        0,
        shape.slots,
        shape.stride,
        shape.page_nbytes,
        capacity,
    )
    trouble = ""
    try:
        old = StateBlock.read(paths.state)
    except FormatVersionError:
        raise
    except FileNotFoundError:
        old = fresh if not paths.slab_numbers() else replace(fresh, clean=False, boot_id=bytes(16))
    except StoreError as error:
        trouble = f"the state block is unreadable ({error}), so every page is verified when read"
        old = replace(fresh, clean=False, boot_id=bytes(16))
    suspect_boot = None if old.clean or old.boot_id == boot else old.boot_id
    state = replace(fresh, store_uuid=old.store_uuid, epoch=old.epoch + 1, clean=False, sequence=old.sequence)
    return state, suspect_boot, trouble


@dataclass(slots=True)
class Recovered:
    """Pages to keep; `order` lists their rows, least recent first."""

    slots: NDArray[np.int64]
    records: NDArray[np.void]
    keys: list[bytes]
    order: NDArray[np.int64]


def recover_pages(partition: Partition, *, most_slots: int, unclean: bool) -> Recovered:
    """Map every slab of a partition and choose the pages to keep.

    A slab that is damaged, or numbered beyond `most_slots`, is dropped, reported and removed. Of two records
    of one key the one with the higher commit sequence is kept. After an unclean end (`unclean`) pages without
    a checksum are dropped.

    Raises
    ------
    OSError
        Access denied, too many open files, a medium that cannot be read: errors, not losses.
    """
    found: list[Pages] = []
    size = partition.facts.shape.slots
    for number in partition.paths.slab_numbers():
        try:
            if (number + 1) * size > most_slots:
                raise SlabDamagedError(f"slab {number} lies beyond the array")  # noqa: TRY301
            partition.map_slab(number)
        except SlabDamagedError as error:
            if not _unborn(partition.paths, number, partition.facts.page_axes):
                partition.report(str(error))
            partition.remove_slab_files(number)
            continue
        _mend(partition, number)
        found.append(partition.pages_of(number))
    slots = np.concatenate([np.empty(0, np.int64), *(pages.slots for pages in found)])
    records = np.concatenate([new_records(0), *(pages.records for pages in found)])
    keys = [key for pages in found for key in pages.keys]
    usable = records["algorithm"] != CHECKSUM_NONE if unclean else np.ones(len(slots), np.bool_)
    if not usable.all() or len(set(keys)) < len(keys):
        rows = _newest(keys, records["sequence"], usable)
        slots, records, keys = slots[rows], records[rows], [keys[row] for row in rows.tolist()]
    # Within one batch the first page of a chain is the most recent one.
    order = np.lexsort((~records["sequence"], records["created_ns"], records["access_s"]))
    return Recovered(slots, records, keys, order)


def _unborn(paths: PartitionPaths, number: int, page_axes: int) -> bool:
    """Whether a kill came while the slab was being made: its table is there, and empty."""
    try:
        table = read_inside(paths.table(number), ARRAY_FILE, MAX_TABLE_NBYTES)
        return not paths.slab(number, page_axes).exists() and not any(table)
    except OSError:
        return False


def _mend(partition: Partition, number: int) -> None:
    """Complete records that a kill left while they were published anew, for an access time or a flag.

    Such a record cannot be told from one whose payload was being overwritten, but for the payload: it is kept
    where its checksum or tag, which is bound to the key, is right.
    """
    words = partition.tables.tables[number].words
    if not (words[:, GENERATION_WORD] & 1).any():
        return
    records = as_records(words.copy())
    torn = (records["generation"] & 1 == 1) & (records["state"] == COMMITTED)
    cipher = partition.cipher
    algorithm = CHECKSUM_XXH3 if cipher is None else AES_256_GCM
    torn &= (records["algorithm"] == algorithm) & (records["key_nbytes"] - 1 < KEY_MAX_NBYTES)
    index = np.flatnonzero(torn)
    if not len(index):
        return
    slots = index + number * partition.facts.shape.slots
    records = records[index]
    files, offsets = partition.locate(slots)
    whole = np.zeros(len(index), np.bool_)
    with files[0].open(direct=False) as fd:
        for row, (key, offset) in enumerate(zip(keys_of(records), offsets.tolist(), strict=True)):
            payload = bytearray(os.pread(fd, partition.facts.shape.page_nbytes, offset))
            if cipher is not None:
                whole[row] = cipher.open_page(records[row : row + 1], int(slots[row]), memoryview(payload))
                continue
            whole[row] = xxhash.xxh3_64_intdigest(payload, checksum_seed(key)) == records["checksum"][row]
    slots, records = slots[whole], records[whole]
    records["version"], records["valid_nbytes"] = RECORD_VERSION, partition.facts.shape.page_nbytes
    if cipher is None:
        records["reserved"] = 0
    records["generation"] += 1
    seal(records)
    partition.tables.publish(slots, as_words(records))


def _newest(
    keys: Sequence[bytes], sequence: NDArray[np.uint64], usable: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Rows of the highest commit sequence of each key."""
    rows = np.argsort(sequence, kind="stable")
    rows = rows[usable[rows]]
    newest = {keys[row]: row for row in rows.tolist()}  # later rows take over
    return np.fromiter(newest.values(), np.int64, len(newest))
