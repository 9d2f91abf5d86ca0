"""What a writer finds in the partition that it opens: the state it was left in, and the pages to keep."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.errors import FormatVersionError, StoreError

from .record import CHECKSUM_NONE, new_records
from .slab import SlabDamagedError, SlabShape
from .state import STATE_NBYTES, StateBlock, boot_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .partition import Pages, Partition, PartitionPaths


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
        with paths.state.open("rb") as file:
            old = StateBlock.unpack(file.read(STATE_NBYTES + 1), paths.state)
    except FormatVersionError:
        raise
    except FileNotFoundError:
        old = fresh if not paths.slab_numbers() else replace(fresh, clean=False, boot_id=bytes(16))
    except (OSError, StoreError) as error:
        trouble = f"the state block is unreadable ({error}), so every page is verified when read"
        old = replace(fresh, clean=False, boot_id=bytes(16))
    suspect_boot = None if old.clean or old.boot_id == boot else old.boot_id
    state = replace(fresh, store_uuid=old.store_uuid, epoch=old.epoch + 1, clean=False, sequence=old.sequence)
    return state, suspect_boot, trouble


@dataclass(slots=True)
class Recovered:
    """Pages to keep, least recent first."""

    slots: NDArray[np.int64]
    records: NDArray[np.void]
    keys: list[bytes]


def recover_pages(partition: Partition, *, most_slots: int, unclean: bool) -> Recovered:
    """Map every slab of a partition and choose the pages to keep.

    A slab that is damaged, or numbered beyond `most_slots`, is dropped, reported and removed. Of two records
    of one key the one with the higher commit sequence is kept. After an unclean end (`unclean`) pages without
    a checksum are dropped.

    Raises
    ------
    PermissionError
        Access denied is an error, not a loss.
    """
    found: list[Pages] = []
    size = partition.facts.shape.slots
    for number in partition.paths.slab_numbers():
        try:
            if (number + 1) * size > most_slots:
                raise SlabDamagedError(f"slab {number} lies beyond the array")  # noqa: TRY301
            partition.map_slab(number)
        except PermissionError:
            raise
        except (SlabDamagedError, OSError) as error:
            partition.report(str(error))
            partition.remove_slab_files(number)
            continue
        found.append(partition.pages_of(number))
    slots = np.concatenate([np.empty(0, np.int64), *(pages.slots for pages in found)])
    records = np.concatenate([new_records(0), *(pages.records for pages in found)])
    keys = [key for pages in found for key in pages.keys]
    usable = records["algorithm"] != CHECKSUM_NONE if unclean else np.ones(len(slots), np.bool_)
    order = _newest(keys, records["sequence"], usable)
    order = order[np.lexsort((records["sequence"][order], records["access_s"][order]))]
    return Recovered(slots[order], records[order], [keys[row] for row in order.tolist()])


def _newest(
    keys: Sequence[bytes], sequence: NDArray[np.uint64], usable: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Rows of the highest commit sequence of each key."""
    if usable.all() and len(set(keys)) == len(keys):
        return np.arange(len(keys))
    rows = np.argsort(sequence, kind="stable")
    rows = rows[usable[rows]]
    newest = {keys[row]: row for row in rows.tolist()}  # later rows take over
    return np.fromiter(newest.values(), np.int64, len(newest))
