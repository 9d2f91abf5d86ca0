"""The capacity that a user asks for, as bytes."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import humanfriendly

from hicache_tier.errors import InvalidArgumentError, StoreFullError

from .slab import SlabShape
from .table import table_nbytes

_SIZE = re.compile(r"\s*\d{1,40}(\.\d{1,40})?\s*([kmgtp]i?b?|b|bytes?)?\s*", re.IGNORECASE)
_DEFAULT_CAPACITY_NBYTES = 64 << 30
_END_NBYTES = 8 << 60  # where sizes of files end


def parse_capacity(value: object, root: Path) -> int:
    """Bytes of a number, of text such as `"100 GiB"`, or None for the default.

    That is 64 GiB, at most a quarter of what is free or held by this root already, so that it stays what it
    is when the root is opened again.
    """
    if value is None:
        existing = root
        while not existing.exists():
            existing = existing.parent
        free = shutil.disk_usage(existing).free + _held_nbytes(root)
        if not free:
            raise StoreFullError(f"the file system of {root} has no free space; nothing can be stored there.")
        return min(_DEFAULT_CAPACITY_NBYTES, free // 4)
    if isinstance(value, str):
        if not _SIZE.fullmatch(value):
            raise InvalidArgumentError(f"capacity_bytes {value!r} is not a size such as '100 GiB'.")
        nbytes = humanfriendly.parse_size(value)
    elif hasattr(value, "__index__") and not isinstance(value, bool):
        nbytes = value.__index__()
    else:
        raise InvalidArgumentError(f"capacity_bytes must be bytes or text such as '100 GiB', got {value!r}.")
    if nbytes >= _END_NBYTES:
        raise InvalidArgumentError("capacity_bytes must be below 8 EiB.")
    if nbytes <= 0:
        raise InvalidArgumentError(f"capacity_bytes must be above 0, got {nbytes}.")
    return int(nbytes)


def _held_nbytes(root: Path) -> int:
    """Bytes of disk that the files under a root take."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(OSError):
                total += Path(folder, name).lstat().st_blocks * 512
    return total


def check_capacity(page_nbytes: int, capacity_nbytes: int) -> SlabShape:
    """Return the shape of the slabs of a new partition.

    Raises
    ------
    StoreFullError
        Where the capacity holds no page.
    """
    shape = SlabShape.choose(page_nbytes, capacity_nbytes)
    least = shape.file_nbytes + table_nbytes(shape.slots)
    if capacity_nbytes < least:
        raise StoreFullError(
            f"capacity_bytes={capacity_nbytes} holds no page of {page_nbytes} bytes; "
            f"at least {least} are needed."
        )
    return shape
