"""Host memory: how much there is, and page-aligned mappings of it."""

from __future__ import annotations

import logging
import mmap
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from .errors import EngineUnavailableError, InvalidArgumentError, MemoryBudgetError
from .pinning import (
    CHUNK_NBYTES,
    PAGE_NBYTES,
    CudaRegistrar,
    chunks_of,
    human,
    register_chunks,
    unregister_chunks,
)
from .placement import device_node, prefer_node, use_huge_pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .pinning import Chunk, Registrar

log = logging.getLogger(__name__)

_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63

Pinning = bool | Literal["auto"]


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
    chunks : sequence of (int, int), optional
        Offsets and lengths to register one by one; together all of the memory. No copy to or from a device
        may cross from one into the next.

    Attributes
    ----------
    bytes : torch.Tensor
        All of it, uint8.
    address, nbytes : int
    pinned : bool
    """

    def __init__(
        self,
        nbytes: int,
        pinned: Pinning,
        registrar: Registrar | None = None,
        chunks: Sequence[Chunk] | None = None,
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
            self._place(mapping)
            parts = chunks_of(0, self.nbytes, PAGE_NBYTES, CHUNK_NBYTES) if chunks is None else chunks
            self._pin(mapping, registrar, parts, required=pinned is True)

    def _place(self, mapping: mmap.mmap) -> None:
        """Choose pages and node before the first touch, which pinning is."""
        node = device_node(torch.cuda.current_device()) if torch.cuda.is_available() else None
        found = use_huge_pages(mapping), prefer_node(self.address, self.nbytes, node)
        log.info("host memory at %#x: %s", self.address, "; ".join(one.reason for one in found))

    def _pin(
        self, mapping: mmap.mmap, registrar: Registrar, chunks: Sequence[Chunk], *, required: bool
    ) -> None:
        try:
            registered = register_chunks(registrar, self.address, chunks)
        except RuntimeError as error:
            if required:
                raise EngineUnavailableError(f"pinned=True cannot be had: {error}.") from error
            warnings.warn(f"host memory is plain, not pinned: {error}", RuntimeWarning, stacklevel=4)
            return
        # After a fork the first writer gets new physical pages; the device would go on with the old ones.
        mapping.madvise(mmap.MADV_DONTFORK)
        self._unpin = weakref.finalize(self, unregister_chunks, registrar, registered)
        self.pinned = True

    def release(self) -> bool:
        """Unregister and let go; returns whether the range is unmapped now (no view holds it)."""
        if self._unpin is not None:
            self._unpin()
        self.pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)
        return self._mapping() is None
