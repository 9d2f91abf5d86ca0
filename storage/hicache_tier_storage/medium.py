"""What a directory lies on, and files in it that leave nothing behind."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

from hicache_tier.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

_FILESYSTEMS = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
    0x6969: "nfs",
    0x00C36400: "ceph",
    0x65735546: "fuse",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
}
_NETWORK = {"nfs", "ceph", "fuse", "cifs", "smb2", "lustre", "gpfs"}


def filesystem(directory: Path) -> str:
    """Return the kind of file system a directory lies on, by `statfs`."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(256)
    if libc.statfs(os.fsencode(directory), buffer):
        return "unknown"
    magic = ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
    return _FILESYSTEMS.get(magic, f"0x{magic:x}")


def is_network(directory: Path) -> bool:
    """Whether other hosts may write to this directory's file system."""
    return filesystem(directory) in _NETWORK


def existing_parent(directory: Path) -> Path:
    """Return the nearest directory that exists, this one or above it."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    if not directory.is_dir():
        raise StoreError(f"{directory} is not a directory.")
    return directory


def nameless_file(directory: Path, flags: int) -> int:
    """Open a new file that is in no directory, so that nothing is left behind whatever happens."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}:
            raise
    name = directory / f".hct-probe-{os.getpid()}"
    fd = os.open(name, flags | os.O_CREAT, 0o600)
    name.unlink()
    return fd
