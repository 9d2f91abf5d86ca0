"""Which partitions have a live writer, asked so that no writer notices."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from .capacity import LOCK_NAME
from .inside import ARRAY_FILE, ROOT_FILE
from .locks import let_go, open_lock, try_lock, wait_for_lock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from .partition_files import PartitionPaths

_PATIENCE_S = 2.0


def live_writers(root: Path, partitions: Sequence[PartitionPaths]) -> dict[Path, bool | None]:
    """Tell for each partition whether a process holds its writer's lock.

    Every process that tries to take a writer's lock does so while it holds the root's. The probe holds that
    one shared meanwhile, so a writer that starts just now waits a moment and never finds its lock taken.

    Returns
    -------
    dict
        Partition folder to True, False, or None where it cannot be told: the root's lock stayed taken for
        two seconds, or the file system or the permissions do not let locks be tried.
    """
    with _calm(root) as calm:
        return {paths.root: _held(paths.lock) if calm else None for paths in partitions}


@contextmanager
def _calm(root: Path) -> Iterator[bool]:
    try:
        fd = open_lock(root / LOCK_NAME, ROOT_FILE, writable=False)
    except FileNotFoundError:
        yield True  # a copy of a store: no writer has opened it
        return
    except OSError:
        yield False
        return
    try:
        yield _share(fd)
    finally:
        let_go(fd)


def _share(fd: int) -> bool:
    try:
        return wait_for_lock(fd, _PATIENCE_S, shared=True)
    except OSError:
        return False


def _held(lock: Path) -> bool | None:
    try:
        fd = open_lock(lock, ARRAY_FILE, writable=False)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        return not try_lock(fd, shared=True)
    except OSError:
        return None
    finally:
        let_go(fd)
