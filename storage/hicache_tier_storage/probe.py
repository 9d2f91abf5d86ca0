"""Which ways of moving bytes work for a directory, found out by trying."""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_tier.errors import EngineUnavailableError, InvalidArgumentError, not_known

from . import accelerators
from .engine import ByteEngine
from .medium import existing_parent, filesystem, is_network, nameless_file
from .nixl_lane import QUEUES
from .posix import PosixEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ENGINES",
    "IO_MODES",
    "EngineProbe",
    "check_engine",
    "choose_engine",
    "filesystem",
    "is_network",
    "one_of",
    "probe",
    "probe_engines",
    "probe_posix",
]

ENGINES = ("auto", "posix", "nixl", "kvikio")
IO_MODES = ("auto", "direct", "buffered")


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """One way of moving bytes in a directory: does it work, why (not), and does `auto` take it."""

    engine: str
    mode: str
    usable: bool
    reason: str
    chosen: bool


def _try(directory: Path, flags: int) -> str:
    """Write and read one aligned page; return "" or why it does not work."""
    try:
        fd = nameless_file(directory, flags)
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


def probe_posix(directory: str | os.PathLike[str]) -> list[EngineProbe]:
    """Try the engine `posix` in `directory` (or where it would be created).

    Raises
    ------
    StoreError
        Where `directory` is no directory.
    """
    path = existing_parent(Path(directory).absolute())
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


def probe_engines(directory: str | os.PathLike[str]) -> list[EngineProbe]:
    """Try every engine and mode in `directory` (or where it would be created).

    `auto` takes `posix`: for host memory the others are not faster, which
    `hicache-tier bench storage --engine all` shows. For GPU memory it takes what is chosen among the rows
    for that, and where none is, `posix` by way of pinned host memory.

    Raises
    ------
    StoreError
        Where `directory` is no directory.
    """
    rows = probe_posix(directory)
    path = existing_parent(Path(directory).absolute())
    refused = "" if rows[1].usable else rows[1].reason
    found = accelerators.all_findings(path, direct=rows[0].usable, refused=refused)
    for_devices = accelerators.chosen_for_devices(found)
    return rows + [EngineProbe(*finding, chosen=finding == for_devices) for finding in found]


def probe(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return `probe_engines` as plain data."""
    return [asdict(row) for row in probe_engines(directory)]


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise `InvalidArgumentError`, naming the nearest, unless `value` is one of `allowed`."""
    if value not in allowed:
        raise not_known(name, value, allowed)


def check_engine(engine: object, io_mode: object, threads: object) -> None:
    """Refuse what `choose_engine` does not know, before anything is touched."""
    if not isinstance(engine, ByteEngine):
        one_of("engine", engine, ENGINES)
    one_of("io_mode", io_mode, IO_MODES)
    if threads is not None and (type(threads) is not int or threads < 1):
        raise InvalidArgumentError(f"threads must be a whole number above 0, got {threads!r}.")


def choose_engine(directory: Path, engine: str, io_mode: str, threads: int | None) -> ByteEngine:
    """Make the engine for a directory, as asked or as the probe finds it.

    Raises
    ------
    InvalidArgumentError
        For an unknown engine or mode.
    EngineUnavailableError
        Where what was insisted on does not work here; the message says why.
    """
    check_engine(engine, io_mode, threads)
    rows = probe_posix(directory)
    for row in rows:
        wanted = row.chosen if io_mode == "auto" else row.mode == io_mode
        if wanted and row.usable:
            if engine in {"auto", "posix"}:
                return PosixEngine(direct=row.mode == "direct", threads=threads)
            return _accelerated(directory, engine, direct=row.mode == "direct", threads=threads)
    reasons = "; ".join(f"{row.engine} {row.mode}: {row.reason}" for row in rows if not row.usable)
    raise EngineUnavailableError(f"no engine works in {directory} as asked (io_mode={io_mode!r}): {reasons}.")


def _accelerated(directory: Path, engine: str, *, direct: bool, threads: int | None) -> ByteEngine:
    """Make an engine that was insisted on."""
    path = existing_parent(directory)
    if engine == "kvikio":
        found = accelerators.kvikio_host(path)
        if found[0].usable:
            from .kvikio_engine import KvikioEngine

            return KvikioEngine(direct=direct, threads=threads)
    else:
        found = accelerators.nixl_posix(path, direct=direct)
        for queue, finding in zip(QUEUES, found, strict=True):
            if finding.usable:
                from .nixl_engine import NixlEngine

                return NixlEngine(direct=direct, queue=queue, threads=threads)
    reasons = "; ".join(f"{finding.mode}: {finding.reason}" for finding in found)
    raise EngineUnavailableError(
        f"engine {engine!r} does not work in {directory}: {reasons}. "
        "engine='posix' does, and 'auto' takes it."
    )
