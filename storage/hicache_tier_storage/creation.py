"""Taking a writer number, and making or clearing the files of its partition."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_tier.errors import EncryptionError, FormatVersionError, NotAStoreError, StoreError

from .capacity import settle_demand, uses_of
from .encryption import encryption_attribute
from .identity import FORMAT_NAME, FORMAT_VERSION, PLAIN_VERSION
from .inside import ARRAY_FILE, PARTITION_FILE, RANK_FILE, read_inside, remove_inside
from .locks import hold_folder, let_go, open_lock, try_lock
from .metadata import (
    MAX_METADATA_NBYTES,
    component_table,
    group_document,
    pages_document,
    slots_document,
    state_document,
    write_document,
)
from .partition_facts import MAX_SLOTS, PartitionFacts
from .partition_files import PartitionPaths
from .slab import SlabShape
from .state import STATE_NBYTES, StateBlock
from .table import table_nbytes

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_tier.layout import Layout

    from .access import Access

_LOG = logging.getLogger(__name__)
_OWN_FILE = re.compile(r"zarr\.json|c\.\d+(\.0)*")


def lock_partition(space: Path, rank: str, pool: str, access: Access) -> tuple[PartitionPaths, int, int]:
    """Take the first writer number of this rank that no live process holds.

    Returns
    -------
    (paths, number, fd)
        `fd` holds the flock; `locks.let_go` gives the partition up.

    Raises
    ------
    StoreError
        Where a folder of the partition is a symbolic link.
    """
    for number in range(1 << 16):
        paths = PartitionPaths(space / f"{rank}-w{number}" / pool)
        for folder in (paths.root.parent, paths.root, paths.state.parent):
            refuse_link(folder)
            access.make_folder(folder)
        refuse_link(paths.pages)
        refuse_link(paths.slots)
        fd = open_lock(paths.lock, ARRAY_FILE, create=access)
        try:
            if try_lock(fd):
                settle_demand(fd)
                held = hold_folder(paths.root, RANK_FILE)
                if held is not None:
                    let_go(held)  # the partition takes it again; the root's lock is held all the while
                    return paths, number, fd
        except BaseException:
            let_go(fd)
            raise
        let_go(fd)
    raise StoreError(f"{space}: every writer number of {rank} is taken.")


def refuse_link(folder: Path) -> None:
    """Raise `StoreError` for a symbolic link: what lies behind it would be outside the root and its cap."""
    if folder.is_symlink():
        raise StoreError(
            f"{folder} is a symbolic link; all of a store lies within its root. "
            "Move the files back, or mount a file system there."
        )


def existing_facts(paths: PartitionPaths, wanted: PartitionFacts) -> tuple[PartitionFacts | None, list[str]]:
    """Return the facts of the partition at `paths` if it can be used; clear away one that cannot.

    Leftovers of interrupted writes (`*.tmp`) are removed. Where the group is damaged or gone the state block
    tells what the slabs are. The partition's lock must be held.

    Returns
    -------
    (facts, damage)
        `damage` says what was found damaged, for people.

    Raises
    ------
    FormatVersionError
        For a partition of a later version; it is left as it is.
    EncryptionError
        For one of another key; the same.
    StoreError
        Where it cannot be read; it is left as it is.
    """
    facts, damage = _read_facts(paths, wanted)
    _remove_leftovers(paths)
    if facts is not None:
        if facts.geometry != wanted.geometry or facts.page_axes != wanted.page_axes:
            damage.append("it holds pages of another geometry")
            facts = None
        elif facts.shape.file_nbytes + table_nbytes(facts.shape.slots) > wanted.capacity_nbytes:
            damage.append(f"one slab has {facts.shape.file_nbytes} bytes, more than the capacity")
            facts = None
    if facts is None:
        gone = len(paths.slab_numbers())
        _wipe(paths)
        damage = [*damage, f"{gone} slabs were dropped"] if gone else []
    for line in damage:
        _LOG.warning("%s: %s", paths.root, line)
    return facts, damage


def _read_facts(paths: PartitionPaths, wanted: PartitionFacts) -> tuple[PartitionFacts | None, list[str]]:
    damage: list[str] = []
    facts: PartitionFacts | None = None
    try:
        facts = PartitionFacts.read(paths)
    except (FormatVersionError, EncryptionError):
        raise
    except StoreError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error, NotAStoreError):
            raise  # it cannot be read now (EMFILE, EIO, access denied): no reason to lose its pages
        damage.append(f"the partition's group is damaged: {error}")
    if facts is not None and facts.key_check != wanted.key_check:
        raise EncryptionError(f"{paths.root} is encrypted with another key; its pages are left as they are.")
    shape = _stated_shape(paths, wanted) if paths.slab_numbers() else None
    if shape is not None and (facts is None or facts.shape != shape):
        facts = replace(wanted, shape=shape)
        damage.append("its group was written again from its state block, and its slabs kept")
    return facts, damage


def _stated_shape(paths: PartitionPaths, wanted: PartitionFacts) -> SlabShape | None:
    """Shape of the slabs as the state block has it; None where it does not tell, or of other pages."""
    try:
        state = StateBlock.read(paths.state)
    except FormatVersionError:
        raise
    except (OSError, StoreError):
        return None
    shape = SlabShape(state.page_nbytes, state.stride, state.slots_per_slab)
    same = (shape.page_nbytes, shape.stride) == (wanted.shape.page_nbytes, wanted.shape.stride)
    return shape if same and shape.slots > 0 and not shape.slots & (shape.slots - 1) else None


def slots_in_use(paths: PartitionPaths, facts: PartitionFacts) -> int:
    """Slots up to the end of the last slab whose files have the sizes they should."""
    for number in reversed(paths.slab_numbers()):
        if (number + 1) * facts.shape.slots > MAX_SLOTS:
            continue
        with suppress(OSError):
            slab = paths.slab(number, facts.page_axes).lstat().st_size
            table = paths.table(number).lstat().st_size
            if slab == facts.shape.file_nbytes and table == table_nbytes(facts.shape.slots):
                return (number + 1) * facts.shape.slots
    return 0


def documents_agree(paths: PartitionPaths, facts: PartitionFacts, capacity: int) -> bool:
    """Whether the partition's Zarr documents say what is so; `capacity` is in slots."""
    try:
        if PartitionFacts.read(paths) != facts:
            return False
        lengths = [
            json.loads(read_inside(folder / "zarr.json", ARRAY_FILE, MAX_METADATA_NBYTES))["shape"][0]
            for folder in (paths.pages, paths.slots, paths.state.parent)
        ]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False
    return lengths == [capacity, capacity, STATE_NBYTES]


def _remove_leftovers(paths: PartitionPaths) -> None:
    """Remove what interrupted writes left, and a link in the place of the journal, which is but a hint."""
    if paths.journal.is_symlink():
        remove_inside(paths.journal, ARRAY_FILE)
    for folder in (paths.root, paths.pages, paths.slots, paths.state.parent):
        depth = PARTITION_FILE if folder == paths.root else ARRAY_FILE
        for leftover in folder.glob("*.tmp"):
            if _OWN_FILE.fullmatch(leftover.stem) and (leftover.is_symlink() or not leftover.is_dir()):
                remove_inside(leftover, depth)


def _wipe(paths: PartitionPaths) -> None:
    """Remove what makes a partition: its group first, then slabs and tables. Foreign files stay."""
    uses = uses_of(paths)
    remove_inside(paths.root / "zarr.json", PARTITION_FILE)
    for use in uses:
        for path in use.files:
            remove_inside(path, ARRAY_FILE)


def write_documents(
    paths: PartitionPaths, facts: PartitionFacts, layout: Layout, capacity: int, access: Access
) -> None:
    """Write the partition's Zarr documents, its own group last. `capacity` is in slots."""
    shape = facts.shape
    for folder in (paths.pages, paths.slots, paths.state.parent):
        access.make_folder(folder)
    pages = pages_document(facts.geometry, layout, capacity, shape.slots, encrypted=facts.encrypted)
    write_document(paths.pages, pages, ARRAY_FILE, access)
    write_document(paths.slots, slots_document(capacity, shape.slots), ARRAY_FILE, access)
    write_document(paths.state.parent, state_document(), ARRAY_FILE, access)
    attributes = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION if facts.encrypted else PLAIN_VERSION,
        "rank": facts.rank,
        "writer": facts.writer,
        "pool": facts.pool,
        "capacity_bytes": facts.capacity_nbytes,
        "geometry": facts.geometry.as_dict(),
        "axis_order": layout.page_axes,
        "logical_dtype": facts.geometry.dtype.label,
        "components": component_table(facts.geometry, layout),
        "page_axes": facts.page_axes,
        "page_nbytes": shape.page_nbytes,
        "stride": shape.stride,
        "slots_per_slab": shape.slots,
        **encryption_attribute(facts.key_check),
    }
    write_document(paths.root, group_document(attributes), PARTITION_FILE, access)
