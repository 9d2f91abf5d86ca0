"""A disk so small that it fills up, where the system allows one."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_DETACH = 2
_NEW_MOUNTS = 0x00020000
_PRIVATE_ALL = 1 << 18 | 1 << 14
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount_small_disk(path: Path, nbytes: int) -> str:
    """Mount a tmpfs of its own on a directory, for this process and its children; it goes with them.

    Returns
    -------
    str
        "" or why the system does not allow it.
    """
    size = f"size={nbytes}".encode()
    if (
        _LIBC.unshare(_NEW_MOUNTS)
        or _LIBC.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE_ALL), None)
        or _LIBC.mount(b"none", os.fsencode(path), b"tmpfs", ctypes.c_ulong(0), size)
    ):
        return os.strerror(ctypes.get_errno())
    return ""


def unmount(path: Path) -> None:
    """Undo `mount_small_disk`."""
    _LIBC.umount2(os.fsencode(path), _DETACH)
