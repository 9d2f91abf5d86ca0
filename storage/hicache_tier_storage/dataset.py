"""`open_dataset`: a partition of a store as an xarray dataset, read page by page when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_tier.errors import (
    EncryptionError,
    EngineUnavailableError,
    FormatVersionError,
    InvalidArgumentError,
    StoreError,
    how_to_get,
)

from .capacity import PARTITION_NAME
from .census import SlotState, take_census
from .inside import PARTITION_FILE
from .metadata import read_attributes
from .partition_facts import MAX_SLOTS, PartitionFacts
from .record import keys_of
from .survey import survey

if TYPE_CHECKING:
    import os
    from pathlib import Path

    import xarray
    from numpy.typing import NDArray

    from .partition_files import PartitionPaths
    from .survey import Survey


def open_dataset(
    root: str | os.PathLike[str],
    namespace: str | None = None,
    rank: str | None = None,
    writer: int | None = None,
    pool: str = "kv",
) -> xarray.Dataset:
    """Open one partition of a store for analysis; a server may write to it meanwhile.

    Parameters
    ----------
    root : path
    namespace : str, optional
        32 hex digits, as `hicache-tier inspect` lists them; needed where more than one holds such a pool.
    rank : str, optional
        As `tp0of8-pp0of1-cp0of1`; needed where there is more than one.
    writer : int, optional
        Needed where a rank has more than one.
    pool : str

    Returns
    -------
    xarray.Dataset
        `pages` of dims `slot` and those of a page, in the logical dtype (bfloat16 and float8 through
        ml_dtypes); where components differ in shape one variable for each, such as `k` and `v`, whose dims
        of different sizes are named `k_dim` and `v_dim`. Payloads are read when values are asked for.
        Coordinates along `slot` are those at the time of opening: `valid`, whether the slot holds a page,
        and `key`, its key as hex digits. What lies in a slot that is not valid means nothing. On a live
        store a slot may be given to another page later; open again to see. The attributes tell the identity.

    Raises
    ------
    EngineUnavailableError
        Where xarray or ml_dtypes is not installed.
    InvalidArgumentError
        Where no partition, or more than one, is as described; lists those there are.
    EncryptionError
        Where its pages are encrypted.
    NotAStoreError, FormatVersionError, StoreError
        Where `root` is no store, of a later version, or cannot be read.
    """
    try:
        import xarray
        from xarray.core.indexing import LazilyIndexedArray

        from .lazy_pages import LazyPages, numpy_dtype
    except ImportError as error:
        raise EngineUnavailableError(f"open_dataset needs {error.name}: {how_to_get('xarray')}.") from error
    import zarr

    found = survey(root)
    paths = _choose(found, namespace, rank, writer, pool)
    facts = PartitionFacts.read(paths)
    if facts.encrypted:
        raise EncryptionError(f"{paths.root} is encrypted: open an export of it, made with its key.")
    attributes = read_attributes(paths.root, PARTITION_FILE)
    array = zarr.open_array(str(paths.pages), mode="r", zarr_format=3)
    dtype = numpy_dtype(facts.geometry.dtype.label)
    names = list(getattr(array.metadata, "dimension_names", None) or ())
    variables: dict[str, Any] = {}
    if facts.geometry.uniform:
        variables["pages"] = (names, LazilyIndexedArray(LazyPages(array, dtype)))
    else:
        parts = attributes["components"]
        for part, dims in zip(parts, _dimensions(parts), strict=True):
            lazy = LazyPages(array, dtype, (part["offset"], tuple(part["shape"])))
            variables[part["name"]] = (dims, LazilyIndexedArray(lazy))
    if array.shape[0] > MAX_SLOTS:
        raise StoreError(f"{paths.pages} says that it has {array.shape[0]} slots, more than there can be.")
    valid, keys = _snapshot(paths, facts, array.shape[0])
    identity = next(s.identity for s in found.namespaces if s.name == paths.root.parent.parent.name)
    return xarray.Dataset(
        variables,
        coords={"valid": ("slot", valid), "key": ("slot", keys)},
        attrs={"namespace": paths.root.parent.parent.name, "identity": identity, "partition": attributes},
    )


def _dimensions(parts: list[dict[str, Any]]) -> list[list[str]]:
    """Name the dims of each component; one that differs in size gets the component's name before its own."""
    sizes: dict[str, set[int]] = {}
    for part in parts:
        for name, size in zip(part["dimension_names"], part["shape"], strict=True):
            sizes.setdefault(name, set()).add(size)
    return [
        ["slot", *(n if len(sizes[n]) == 1 else f"{part['name']}_{n}" for n in part["dimension_names"])]
        for part in parts
    ]


def _choose(
    found: Survey, namespace: str | None, rank: str | None, writer: int | None, pool: str
) -> PartitionPaths:
    """Return the one partition that is as described."""
    wanted = {"namespace": namespace, "rank": rank, "writer": writer, "pool": pool}
    described = ", ".join(f"{name}={value!r}" for name, value in wanted.items() if value is not None)
    matches = [
        paths
        for paths in found.partitions
        if all(value in {None, has} for value, has in zip(wanted.values(), _names(paths.root), strict=True))
        and (paths.root / "zarr.json").exists()
    ]
    if len(matches) == 1:
        return matches[0]
    listed = [paths for paths in matches or found.partitions if _readable(paths)]
    lines = "".join(f"\n  {_describe(paths.root)}" for paths in listed)
    if matches:
        raise InvalidArgumentError(
            f"{len(matches)} partitions of {found.root} match {described}; name one of:{lines}"
        )
    raise InvalidArgumentError(
        f"no partition of {found.root} matches {described}. There are:{lines or ' none'}"
    )


def _names(path: Path) -> tuple[str, str, int, str]:
    match = PARTITION_NAME.fullmatch(path.parent.name)
    rank, writer = (match[1], int(match[2])) if match else (path.parent.name, -1)
    return path.parent.parent.name, rank, writer, path.name


def _describe(path: Path) -> str:
    fields = zip(("namespace", "rank", "writer", "pool"), _names(path), strict=True)
    return ", ".join(f"{name}={value!r}" for name, value in fields)


def _readable(paths: PartitionPaths) -> bool:
    try:
        PartitionFacts.read(paths)
    except FormatVersionError:
        raise
    except StoreError:
        return False
    return True


def _snapshot(
    paths: PartitionPaths, facts: PartitionFacts, capacity: int
) -> tuple[NDArray[np.bool_], NDArray[np.str_]]:
    """Return which slots hold pages, and their keys as hex digits."""
    valid, keys = np.zeros(capacity, np.bool_), np.zeros(capacity, "U64")
    for number in paths.slab_numbers():
        census = take_census(paths, facts, number)
        if census is None or census.problem:
            continue
        index, records = census.records(SlotState.COMMITTED)
        slots = index + number * facts.shape.slots
        inside = slots < capacity
        valid[slots[inside]] = True
        keys[slots[inside]] = [key.hex() for key in keys_of(records[inside])]
    return valid, keys
