"""`zarr.json` documents of a store, and how files appear atomically.

A store is ordinary Zarr v3: groups, a sharded array of pages, and two plain byte arrays. These documents are
written once; payload bytes never pass through Zarr.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hicache_tier.errors import FormatVersionError, NotAStoreError, StoreError

from .access import Access
from .encryption import ALGORITHM
from .identity import FORMAT_NAME, FORMAT_VERSION
from .inside import NotPlainError, folder_of, read_inside
from .record import RECORD_NBYTES
from .state import STATE_NBYTES

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout

_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
MAX_METADATA_NBYTES = 1 << 20


def group_document(attributes: dict[str, Any]) -> dict[str, Any]:
    """`zarr.json` of a group whose attributes carry `hicache_tier`."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {"hicache_tier": attributes}}


def plain_group_document() -> dict[str, Any]:
    """`zarr.json` of a rank's group, which only joins its pools to the namespace."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


def _array(
    shape: list[int], chunk: list[int], dtype: str, codecs: list[Any], names: list[str], **attributes: object
) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": codecs,
        "dimension_names": names,
        "attributes": {"hicache_tier": attributes} if attributes else {},
    }


def stored_axes(geometry: KVGeometry, layout: Layout, *, encrypted: bool) -> dict[str, int]:
    """Names and lengths of a page's axes in the `pages` array; an encrypted page is but bytes."""
    if encrypted:
        return {"byte": geometry.page_nbytes}
    return dict(zip(layout.page_dimension_names(geometry), layout.page_shape(geometry), strict=True))


def pages_document(
    geometry: KVGeometry, layout: Layout, capacity: int, slots_per_slab: int, *, encrypted: bool = False
) -> dict[str, Any]:
    """`zarr.json` of the `pages` array: shape `[capacity, *page_shape]`, one shard a slab."""
    axes = stored_axes(geometry, layout, encrypted=encrypted)
    page = list(axes.values())
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [1, *page],
            "codecs": [_BYTES],
            "index_codecs": [_BYTES, {"name": "crc32c"}],
            "index_location": "end",
        },
    }
    dtype = geometry.dtype.storage if geometry.uniform and not encrypted else "uint8"
    return _array(
        [capacity, *page],
        [slots_per_slab, *page],
        dtype,
        [sharding],
        ["slot", *axes],
        logical_dtype=geometry.dtype.label,
        page_nbytes=geometry.page_nbytes,
        components=component_table(geometry, layout),
        **({"encryption": ALGORITHM} if encrypted else {}),
    )


def component_table(geometry: KVGeometry, layout: Layout) -> list[dict[str, Any]]:
    """Name, byte offset, shape, dimension names and dtype of each component of a page."""
    rows, offset = [], 0
    for component in geometry.components:
        rows.append(
            {
                "name": component.name,
                "offset": offset,
                "shape": list(layout.component_shape(geometry, component)),
                "dimension_names": list(layout.component_dimension_names(geometry)),
                "dtype": geometry.dtype.label,
            }
        )
        offset += geometry.component_nbytes(component)
    return rows


def slots_document(capacity: int, slots_per_slab: int) -> dict[str, Any]:
    """`zarr.json` of the slot table: `uint8 [capacity, 128]`, one chunk a slab."""
    return _array(
        [capacity, RECORD_NBYTES],
        [slots_per_slab, RECORD_NBYTES],
        "uint8",
        [_BYTES],
        ["slot", "record_byte"],  # not "byte": xarray wants one size for one name in a group
    )


def state_document() -> dict[str, Any]:
    """`zarr.json` of the state block: `uint8 [4096]`."""
    return _array([STATE_NBYTES], [STATE_NBYTES], "uint8", [_BYTES], ["state_byte"])


def write_document(path: Path, document: dict[str, Any], depth: int, access: Access = Access.PRIVATE) -> None:
    """Write `path/zarr.json` so that a reader sees the old or the new one, never a part.

    `depth` is as of `inside.open_inside`.
    """
    replace_file(path / "zarr.json", json.dumps(document, indent=1, sort_keys=True).encode(), depth, access)


def replace_file(path: Path, data: bytes, depth: int, access: Access = Access.PRIVATE) -> None:
    """Write `data` beside `path`, sync it, and rename it into place; `depth` as of `inside.open_inside`."""
    temporary = temporary_name(path).name
    with folder_of(path, depth) as folder:
        fd = create_new(temporary, folder, access)
        try:
            with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)


def temporary_name(path: Path) -> Path:
    """Where a file is made before it is renamed into place."""
    return path.with_name(path.name + ".tmp")


def create_new(name: str, folder: int, access: Access = Access.PRIVATE) -> int:
    """Open a new file of a folder to read and write.

    What an interrupted write left there goes; links do not count.
    """
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, access.file_mode, dir_fd=folder)
    access.settle(fd)
    return fd


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_attributes(path: Path, depth: int) -> dict[str, Any]:
    """Return `attributes.hicache_tier` of the group at `path`.

    Parameters
    ----------
    path : Path
    depth : int
        Of its `zarr.json`, as of `inside.open_inside`.

    Raises
    ------
    NotAStoreError
        Where there is no such group, or it is somebody else's.
    FormatVersionError
        Where it is of a later version.
    """
    file = path / "zarr.json"
    try:
        raw = read_inside(file, depth, MAX_METADATA_NBYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotAStoreError(f"{path} holds no zarr.json.") from error
    except NotPlainError as error:
        raise NotAStoreError(f"{file} is not a store's group: {error.strerror}.") from error
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}.") from error
    try:
        attributes = json.loads(raw)["attributes"]["hicache_tier"]
        name, version = attributes["format"], attributes["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotAStoreError(f"{file} is not a store's group: {error!r}.") from error
    if name != FORMAT_NAME or not isinstance(version, int):
        raise NotAStoreError(
            f"{file} says format {name!r} version {version!r}; a store's is {FORMAT_NAME!r}."
        )
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{path} is of format version {version}; this release reads up to version {FORMAT_VERSION}. "
            "Upgrade to open it; nothing was changed."
        )
    return dict(attributes)
