"""Which partitions have a live writer, asked so that no writer notices."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .capacity import LOCK_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from .partition import PartitionPaths

_PATIENCE_S = 2.0
_POLL_S = 0.005


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
        fd = os.open(root / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield True  # a copy of a store: no writer has opened it
        return
    except OSError:
        yield False
        return
    try:
        yield _share(fd, time.monotonic() + _PATIENCE_S)
    finally:
        os.close(fd)


def _share(fd: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def _held(lock: Path) -> bool | None:
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        return False
    finally:
        os.close(fd)
