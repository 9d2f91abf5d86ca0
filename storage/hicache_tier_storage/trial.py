"""One way of moving bytes, tried in a process of its own: a small aligned write, the same bytes read back.

Plug-ins may hang or crash as they are made (GDS without a GPU spins for ever), which must not be the user's
process. `trials.py` starts the trial, with a deadline.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .cufile_library import forbid_compatibility, preload_cufile
from .descriptors import Descriptors
from .device_bytes import DeviceBytes
from .engine import DeviceMemory
from .kvikio_package import kvikio_module, missing_library
from .medium import nameless_file
from .nixl_lane import NixlLane, gpu_plugin, posix_plugin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NBYTES = 4096
_PIECES = 16  # in one transfer: plug-ins that never end may still move one
_GPU_NBYTES = _PIECES * _NBYTES
_PAGE = np.zeros(1, np.int64)
_DEADLINE_S = 5.0
GOOD = "a small aligned write and read came back equal"


def nixl_posix(directory: Path, queue: str, *, direct: bool) -> str:
    """Try NIXL's POSIX plug-in with one of its queues; return "" or why it does not work."""
    lane = NixlLane(posix_plugin(queue), _DEADLINE_S)
    buffer = mmap.mmap(-1, 2 * _NBYTES)
    buffer[:_NBYTES] = os.urandom(_NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    fd = nameless_file(directory, os.O_DIRECT if direct else 0)
    try:
        os.posix_fallocate(fd, 0, _NBYTES)
        lane.cover(address, address + 2 * _NBYTES)
        files = np.array([[0, _NBYTES, fd]], np.uint64)
        for at, write in ((0, True), (_NBYTES, False)):
            memory = np.array([[address + at, _NBYTES, 0]], np.uint64)
            lane.transfer(Descriptors(memory, files, _PAGE), {fd: _NBYTES}, write=write)
    finally:
        os.close(fd)
    lane.close()
    return "" if buffer[:_NBYTES] == buffer[_NBYTES:] else "a small aligned read gave other bytes"


def kvikio_host(directory: Path) -> str:
    """Try kvikio with host memory; return "" or why it does not work."""
    kvikio = kvikio_module()
    path = directory / f".hct-probe-{os.getpid()}"
    source = np.frombuffer(os.urandom(_NBYTES), np.uint8)
    target = np.zeros(_NBYTES, np.uint8)
    try:
        with kvikio.CuFile(path, "w+") as file:
            file.write(source)
            file.read(target)
    finally:
        path.unlink(missing_ok=True)
    return "" if (source == target).all() else "a small aligned read gave other bytes"


def nixl_gpu(directory: Path, plugin: str, *, direct: bool) -> str:
    """Try one of NIXL's plug-ins for GPU memory; return "" or why it does not work."""
    why = missing_library("libcuda.so.1", "no NVIDIA driver") or preload_cufile()
    if why:
        return why
    with _device_pages() as (memory, source, target), _named_file(directory) as path:
        lane = NixlLane(gpu_plugin(plugin), _DEADLINE_S)
        fd = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        lane.cover_device(memory)
        at, size = np.arange(0, _GPU_NBYTES, _NBYTES, dtype=np.uint64), np.full(_PIECES, _NBYTES, np.uint64)
        files = np.stack([at, size, np.full(_PIECES, fd, np.uint64)], axis=1)
        for address, write in ((source, True), (target, False)):
            place = np.full(_PIECES, memory.device, np.uint64)
            rows = np.stack([at + np.uint64(address), size, place], axis=1)
            pieces = Descriptors(rows, files, np.arange(_PIECES))
            lane.transfer(pieces, {fd: _GPU_NBYTES}, write=write)
        return _compared(memory)


def kvikio_gpudirect(directory: Path) -> str:
    """Try kvikio with GPU memory where cuFile may not copy through host memory; return "" or why not."""
    why = forbid_compatibility()
    if why:
        return why
    kvikio = kvikio_module()
    kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF)
    return kvikio_gpu(directory)


def kvikio_gpu(directory: Path) -> str:
    """Try kvikio with GPU memory; return "" or why it does not work."""
    kvikio = kvikio_module()
    with _device_pages() as (memory, source, target), _named_file(directory) as path:
        with kvikio.CuFile(path, "r+") as file:
            file.write(DeviceBytes(source, _GPU_NBYTES))
            file.read(DeviceBytes(target, _GPU_NBYTES))
        return _compared(memory)


@contextmanager
def _named_file(directory: Path) -> Iterator[Path]:
    """Make a small file; cuFile does not take nameless ones everywhere."""
    path = directory / f".hct-probe-{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, _GPU_NBYTES)
        yield path
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


@contextmanager
def _device_pages() -> Iterator[tuple[DeviceMemory, int, int]]:
    """Make two stretches on the first device, the first random; yield them and their addresses."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device")
    raw = torch.zeros(2 * _GPU_NBYTES + _NBYTES, dtype=torch.uint8, device="cuda:0")
    skew = -raw.data_ptr() % _NBYTES
    pages = raw[skew : skew + 2 * _GPU_NBYTES].view(2, _GPU_NBYTES)
    pages[0] = torch.randint(0, 256, (_GPU_NBYTES,), dtype=torch.uint8)
    torch.cuda.synchronize()
    address = pages.data_ptr()
    yield DeviceMemory(0, ((address, 2 * _GPU_NBYTES),), pages), address, address + _GPU_NBYTES


def _compared(memory: DeviceMemory) -> str:
    pages: Any = memory.owner
    return "" if bool((pages[0] == pages[1]).all()) else "a small aligned read gave other bytes"


_TRIALS: dict[str, Callable[..., str]] = {
    "nixl_posix": nixl_posix,
    "nixl_gpu": nixl_gpu,
    "kvikio_host": kvikio_host,
    "kvikio_gpu": kvikio_gpu,
    "kvikio_gpudirect": kvikio_gpudirect,
}


def main(order: dict[str, Any]) -> None:
    """Carry out a trial and print its verdict as one line of JSON, then end at once."""
    try:
        why = _TRIALS[order["trial"]](Path(order["directory"]), **order["options"])
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        text = " ".join(str(error).split())
        why = text or type(error).__name__
    print(json.dumps({"why": why}))
    sys.stdout.flush()
    os._exit(0)  # destructors of plug-ins may hang
