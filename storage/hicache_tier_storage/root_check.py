"""Whether a directory is the root of a store, or may become one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hicache_tier.errors import NotAStoreError, StoreError

from .capacity import LOCK_NAME, partition_paths

if TYPE_CHECKING:
    from pathlib import Path


def check_root(root: Path, *, create: bool) -> None:
    """Refuse a root that is something else than a store, before anything is touched.

    Raises
    ------
    NotAStoreError
        For a file, or a directory with other things in it and no store.
    StoreError
        Where it cannot be read, or created.
    """
    if not root.exists():
        if not create:
            raise NotAStoreError(f"{root} does not exist.")
        return
    if not root.is_dir():
        raise NotAStoreError(f"{root} is not a directory.")
    try:
        names = [entry.name for entry in root.iterdir()]
    except OSError as error:
        raise StoreError(f"{root} cannot be read: {error.strerror}.") from error
    ours = LOCK_NAME in names or next(partition_paths(root), None) is not None
    if names and not ours and (not create or set(names) != {"lost+found"}):
        inside = next((folder for folder in root.parents if (folder / LOCK_NAME).exists()), None)
        advice = "Name an empty or new directory." if create else "Name the root of a store."
        if inside is not None:
            advice = f"It lies inside the store {inside}."
        raise NotAStoreError(
            f"{root} is not a store: it holds {len(names)} other entries "
            f"({', '.join(sorted(names)[:3])}, ...). {advice}"
        )
    if not names and not create:
        raise NotAStoreError(f"{root} is empty: there is no store in it.")
    if create and not os.access(root, os.W_OK | os.X_OK):
        raise StoreError(f"{root} cannot be written; open it with read_only=True to read what it holds.")
