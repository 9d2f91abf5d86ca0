"""Which ways of moving bytes work for a directory, found out by trying."""

from __future__ import annotations

import ctypes
import difflib
import errno
import mmap
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_tier.errors import EngineUnavailableError, InvalidArgumentError, StoreError

from .engine import ByteEngine
from .posix import PosixEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

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
ENGINES = ("auto", "posix")
IO_MODES = ("auto", "direct", "buffered")


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """One way of moving bytes in a directory: does it work, why (not), and does `auto` take it."""

    engine: str
    mode: str
    usable: bool
    reason: str
    chosen: bool


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


def _existing_parent(directory: Path) -> Path:
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    if not directory.is_dir():
        raise StoreError(f"{directory} is not a directory.")
    return directory


def _try(directory: Path, flags: int) -> str:
    """Write and read one aligned page; return "" or why it does not work."""
    try:
        fd = _nameless(directory, flags)
        try:
            buffer = mmap.mmap(-1, 8192)
            buffer[:4096] = os.urandom(4096)
            view = memoryview(buffer)
            # 512-byte granularity is what pages whose size is no multiple of 4096 need.
            if os.pwritev(fd, [view[:4096]], 0) != 4096 or os.pwritev(fd, [view[512:1024]], 4096) != 512:
                return "a small aligned write came back short"
            if os.preadv(fd, [view[4096:]], 0) != 4096 or view[:4096] != view[4096:]:
                return "a small aligned read gave other bytes"
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return ""  # a full disk says nothing against the mode
        denied = error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT}
        return f"{'the directory cannot be written' if denied else 'refused'}: {error.strerror}"
    return ""


def _nameless(directory: Path, flags: int) -> int:
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


def probe_engines(directory: str | os.PathLike[str]) -> list[EngineProbe]:
    """Try every engine and mode in `directory` (or where it would be created).

    Raises
    ------
    StoreError
        Where `directory` is no directory.
    """
    path = _existing_parent(Path(directory).absolute())
    kind = filesystem(path)
    buffered = _try(path, 0)
    direct = f"{kind} keeps its files in memory" if kind == "tmpfs" else _try(path, os.O_DIRECT)
    good = "a small aligned write and read came back equal"
    return [
        EngineProbe("posix", "direct", not direct, f"{kind}: {direct or good}", not direct),
        EngineProbe(
            "posix", "buffered", not buffered, f"{kind}: {buffered or good}", bool(direct) and not buffered
        ),
    ]


def probe(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return `probe_engines` as plain data."""
    return [asdict(row) for row in probe_engines(directory)]


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise `InvalidArgumentError`, naming the nearest, unless `value` is one of `allowed`."""
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InvalidArgumentError(f"{name} {value!r} is not known.{hint} Allowed: {', '.join(allowed)}.")


def check_engine(engine: object, io_mode: object, threads: object) -> None:
    """Refuse what `choose_engine` does not know, before anything is touched."""
    if not isinstance(engine, ByteEngine):
        one_of("engine", engine, ENGINES)
    one_of("io_mode", io_mode, IO_MODES)
    if threads is not None and (type(threads) is not int or threads < 1):
        raise InvalidArgumentError(f"threads must be a whole number above 0, got {threads!r}.")


def choose_engine(directory: Path, engine: str, io_mode: str, threads: int | None) -> PosixEngine:
    """Make the engine for a directory, as asked or as the probe finds it.

    Raises
    ------
    InvalidArgumentError
        For an unknown engine or mode.
    EngineUnavailableError
        Where what was insisted on does not work here; the message says why.
    """
    check_engine(engine, io_mode, threads)
    rows = probe_engines(directory)
    for row in rows:
        wanted = row.chosen if io_mode == "auto" else row.mode == io_mode
        if wanted and row.usable:
            return PosixEngine(direct=row.mode == "direct", threads=threads)
    reasons = "; ".join(f"{row.engine} {row.mode}: {row.reason}" for row in rows if not row.usable)
    raise EngineUnavailableError(f"no engine works in {directory} as asked (io_mode={io_mode!r}): {reasons}.")
