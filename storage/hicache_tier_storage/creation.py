"""Taking a writer number, and making or clearing the files of its partition."""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_tier.errors import FormatVersionError, NotAStoreError, StoreError

from .identity import FORMAT_NAME, FORMAT_VERSION
from .metadata import (
    component_table,
    group_document,
    pages_document,
    slots_document,
    state_document,
    write_document,
)
from .partition import PartitionFacts, PartitionPaths
from .table import table_nbytes

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_tier.layout import Layout

_OWN_FILE = re.compile(r"zarr\.json|c\.\d+(\.0)*")


def lock_partition(space: Path, rank: str, pool: str) -> tuple[PartitionPaths, int, int]:
    """Take the first writer number of this rank that no live process holds.

    Returns
    -------
    (paths, number, fd)
        `fd` holds the flock; closing it gives the partition up.
    """
    for number in range(1 << 16):
        paths = PartitionPaths(space / f"{rank}-w{number}" / pool)
        for folder in (paths.root.parent, paths.root, paths.state.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        return paths, number, fd
    raise StoreError(f"{space}: every writer number of {rank} is taken.")


def existing_facts(paths: PartitionPaths, wanted: PartitionFacts) -> PartitionFacts | None:
    """Return the facts of the partition at `paths` if it can be used; clear away one that cannot.

    Leftovers of interrupted writes (`*.tmp`) are removed. The partition's lock must be held.

    Raises
    ------
    FormatVersionError
        For a partition of a later version; it is left as it is.
    StoreError
        Where it cannot be read; it is left as it is.
    """
    try:
        facts = PartitionFacts.read(paths)
    except FormatVersionError:
        raise
    except StoreError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error, NotAStoreError):
            raise  # it cannot be read now (EMFILE, EIO, access denied): no reason to lose its pages
        _remove_leftovers(paths)
        _wipe(paths)
        return None
    _remove_leftovers(paths)
    fits = facts.shape.file_nbytes + table_nbytes(facts.shape.slots) <= wanted.capacity_nbytes
    if facts.geometry != wanted.geometry or facts.page_axes != wanted.page_axes or not fits:
        _wipe(paths)
        return None
    return facts


def _remove_leftovers(paths: PartitionPaths) -> None:
    """Remove what interrupted writes left."""
    for folder in (paths.root, paths.pages, paths.slots, paths.state.parent):
        for leftover in folder.glob("*.tmp"):
            if _OWN_FILE.fullmatch(leftover.stem):
                leftover.unlink()


def _wipe(paths: PartitionPaths) -> None:
    """Remove what makes a partition: its group first, then slabs and tables. Foreign files stay."""
    with suppress(FileNotFoundError):
        (paths.root / "zarr.json").unlink()
    for number in paths.slab_numbers():
        for slab in paths.pages.glob(f"c.{number}.*"):
            if _OWN_FILE.fullmatch(slab.name):
                slab.unlink()
        paths.table(number).unlink()


def write_documents(paths: PartitionPaths, facts: PartitionFacts, layout: Layout, capacity: int) -> None:
    """Write the partition's Zarr documents, its own group last. `capacity` is in slots."""
    shape = facts.shape
    for folder in (paths.pages, paths.slots, paths.state.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    write_document(paths.pages, pages_document(facts.geometry, layout, capacity, shape.slots))
    write_document(paths.slots, slots_document(capacity, shape.slots))
    write_document(paths.state.parent, state_document())
    attributes = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
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
    }
    write_document(paths.root, group_document(attributes))
