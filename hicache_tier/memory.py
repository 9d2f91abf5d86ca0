"""Host memory: how much there is, page-aligned mappings, and their registration with CUDA."""

from __future__ import annotations

import ctypes
import logging
import mmap
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import humanfriendly
import torch

from .errors import EngineUnavailableError, InvalidArgumentError, MemoryBudgetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

log = logging.getLogger(__name__)

PAGE_NBYTES = 4096
CHUNK_NBYTES = 1 << 30
"""Bytes registered with CUDA in one call; one call over hundreds of GiB holds the driver for seconds."""
_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63
_HOST_REGISTER_PORTABLE = 1

Pinning = bool | Literal["auto"]


def human(nbytes: int) -> str:
    """Return a byte count for people, in binary units."""
    return str(humanfriendly.format_size(nbytes, binary=True))


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A bound on what may still be allocated: its name and the bytes left under it."""

    name: str
    available: int


def memory_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Read what the host and the process's cgroups (v1 and v2, all levels) still have.

    Parameters
    ----------
    root : Path
        Where `proc` and the mount points are; another one in tests.
    """
    return (*_host_limits(root), *_cgroup_limits(root))


def check_budget(needed: int, limits: Sequence[MemoryLimit] | None = None) -> None:
    """Raise `MemoryBudgetError` where `needed` bytes do not fit the tightest limit; touches no memory."""
    found = memory_limits() if limits is None else limits
    tightest = min(found, key=lambda limit: limit.available, default=None)
    if tightest is not None and needed > tightest.available:
        raise MemoryBudgetError(
            f"the pool needs {human(needed)} and {tightest.name} leaves {human(max(0, tightest.available))}. "
            f"Ask for fewer pages or raise that limit."
        )


def _host_limits(root: Path) -> Iterator[MemoryLimit]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield MemoryLimit("the host (MemAvailable)", int(line.split()[1]) * 1024)


def _cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    mounts = {}  # "" is version 2, "memory" the controller of version 1
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, (fstype, *rest) = left.split(), right.split() or [""]
        if fstype == "cgroup2":
            mounts[""] = (fields[3], fields[4])
        elif fstype == "cgroup" and "memory" in rest[-1].split(","):
            mounts["memory"] = (fields[3], fields[4])
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        key = next((name for name in controllers.split(",") if name in mounts), None)
        if key is None:
            continue
        mount_root, mount_point = mounts[key]
        top = root / mount_point.lstrip("/")
        inside = path.removeprefix(mount_root.rstrip("/")).lstrip("/")
        folder = top / inside
        if ".." in folder.parts or not folder.is_dir():
            folder = top  # another cgroup namespace: the mount shows our own group as its root
        while True:
            yield from _group_limit(folder, version=2 if key == "" else 1)
            if folder == top:
                break
            folder = folder.parent


def _group_limit(folder: Path, version: int) -> Iterator[MemoryLimit]:
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    values = [next(iter(_lines(folder / name)), "") for name in names]
    if not all(value.isdigit() for value in values):
        return  # "max", or a level without the controller
    limit, used = map(int, values)
    if limit >= _NO_LIMIT:
        return
    prefix = "" if version == 2 else "total_"
    cache = {f"{prefix}inactive_file", f"{prefix}active_file"}
    pairs = (line.split() for line in _lines(folder / "memory.stat"))
    reclaimable = sum(int(pair[1]) for pair in pairs if pair[0] in cache)
    available = limit - max(0, used - reclaimable)
    yield MemoryLimit(f"the cgroup v{version} limit of {human(limit)} in {folder / names[0]}", available)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


class Registrar(Protocol):
    """Page-locks memory for a device."""

    def unavailable(self) -> str | None:
        """Return why nothing can be registered here, or None."""

    def register(self, address: int, nbytes: int) -> None:
        """Register a range; raises `RuntimeError` with the driver's words."""

    def unregister(self, address: int) -> None:
        """Undo `register`; raises `RuntimeError`."""

    def clear_error(self) -> None:
        """Clear the driver's sticky error, so that the next unrelated call does not report it."""


def _runtime() -> Any:  # noqa: ANN401 - a module of torch without types
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class CudaRegistrar:
    """`cudaHostRegister` through torch."""

    def unavailable(self) -> str | None:
        """Return why nothing can be registered here, or None."""
        return None if torch.cuda.is_available() else "no CUDA device"

    def register(self, address: int, nbytes: int) -> None:
        """Register a range, portable to all contexts."""
        self._check(_runtime().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._check(_runtime().cudaHostUnregister(address))

    def clear_error(self) -> None:
        """Call `cudaGetLastError`, which torch does not expose, in the runtime that torch loaded."""
        runtime = next(
            (line.split()[-1] for line in _lines(Path("/proc/self/maps")) if "libcudart" in line), None
        )
        if runtime is not None:
            ctypes.CDLL(runtime).cudaGetLastError()

    @staticmethod
    def _check(code: Any) -> None:  # noqa: ANN401 - an enum of torch without types
        value = int(code)
        if value:
            raise RuntimeError(f"CUDA error {value}: {_runtime().cudaGetErrorString(code)}")


def register_chunks(registrar: Registrar, address: int, nbytes: int, chunk_nbytes: int) -> tuple[int, ...]:
    """Register a range in chunks and return their addresses; undone and cleared where one fails.

    Raises
    ------
    RuntimeError
        Says which chunk failed and why. No chunk is registered then.
    """
    done: list[int] = []
    starts = range(0, nbytes, chunk_nbytes)
    for number, start in enumerate(starts):
        try:
            registrar.register(address + start, min(chunk_nbytes, nbytes - start))
        except RuntimeError as error:
            registrar.clear_error()
            unregister_chunks(registrar, tuple(done))
            raise RuntimeError(
                f"registering chunk {number + 1} of {len(starts)} of {human(chunk_nbytes)} failed: {error}"
            ) from error
        done.append(address + start)
    return tuple(done)


def unregister_chunks(registrar: Registrar, addresses: tuple[int, ...]) -> None:
    """Unregister all chunks; one that fails is logged, cleared, and does not keep the others."""
    for address in reversed(addresses):
        try:
            registrar.unregister(address)
        except RuntimeError as error:
            registrar.clear_error()
            log.warning("unregistering host memory at %#x failed: %s", address, error)


class HostMemory:
    """Anonymous private memory, page-aligned, zero-filled, registered with CUDA where asked.

    It has no name anywhere, so the kernel takes it back whatever ends the process. Views keep it mapped:
    after `release` the range is unmapped once the last tensor over it is gone.

    Parameters
    ----------
    nbytes : int
        Rounded up to whole memory pages.
    pinned : bool or "auto"
        `True` raises where it cannot be registered, `"auto"` warns and goes on with plain memory.
    registrar : Registrar, optional
    chunk_nbytes : int
        Bytes to register in one call.
    """

    def __init__(
        self,
        nbytes: int,
        pinned: Pinning,
        registrar: Registrar | None = None,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        if not isinstance(pinned, bool) and pinned != "auto":
            raise InvalidArgumentError(f"pinned {pinned!r} is not known. Allowed: 'auto', True, False.")
        registrar = CudaRegistrar() if registrar is None else registrar
        why_not = registrar.unavailable() if pinned else None
        if why_not is not None and pinned is True:
            raise EngineUnavailableError(f"pinned=True cannot be had: {why_not}. Use pinned='auto' or False.")
        self.nbytes = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        try:
            mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryBudgetError(f"the kernel refused to map {human(self.nbytes)}: {error}") from error
        self._mapping = weakref.ref(mapping)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self.pinned = False
        self._unpin: weakref.finalize[..., HostMemory] | None = None
        if why_not is not None:
            log.info("host memory is plain, not pinned: %s", why_not)
        elif pinned:
            self._pin(mapping, registrar, chunk_nbytes, required=pinned is True)

    def _pin(self, mapping: mmap.mmap, registrar: Registrar, chunk_nbytes: int, *, required: bool) -> None:
        try:
            chunks = register_chunks(registrar, self.address, self.nbytes, chunk_nbytes)
        except RuntimeError as error:
            if required:
                raise EngineUnavailableError(f"pinned=True cannot be had: {error}.") from error
            warnings.warn(f"host memory is plain, not pinned: {error}", RuntimeWarning, stacklevel=4)
            return
        # After a fork the first writer gets new physical pages; the device would go on with the old ones.
        mapping.madvise(mmap.MADV_DONTFORK)
        self._unpin = weakref.finalize(self, unregister_chunks, registrar, chunks)
        self.pinned = True

    def release(self) -> bool:
        """Unregister and let go; returns whether the range is unmapped now (no view holds it)."""
        if self._unpin is not None:
            self._unpin()
        self.pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)
        return self._mapping() is None
