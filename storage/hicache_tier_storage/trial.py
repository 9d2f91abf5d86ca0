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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .descriptors import Descriptors
from .kvikio_package import kvikio_module, missing_library
from .medium import nameless_file
from .nixl_lane import NixlLane
from .nixl_package import nixl_module

if TYPE_CHECKING:
    from collections.abc import Callable

_NBYTES = 4096
_DEADLINE_S = 5.0
GOOD = "a small aligned write and read came back equal"


def nixl_posix(directory: Path, queue: str, *, direct: bool) -> str:
    """Try NIXL's POSIX plug-in with one of its queues; return "" or why it does not work."""
    lane = NixlLane(queue, _DEADLINE_S)
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
            lane.transfer(Descriptors(memory, files), {fd: _NBYTES}, write=write)
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


def nixl_gds(directory: Path, plugin: str) -> str:
    """Try to make a GDS plug-in of NIXL; return why it does not work, or that nothing uses it."""
    lacks = (
        missing_library("libcuda.so.1", "no NVIDIA driver"),
        missing_library("libcufile.so.0", "install nvidia-cufile, or add it to LD_LIBRARY_PATH"),
    )
    why = "; ".join(lack for lack in lacks if lack)
    if why:
        return why
    ctypes.CDLL("libcufile.so.0", mode=ctypes.RTLD_GLOBAL)  # where the plug-in looks for it
    nixl = nixl_module()
    agent = nixl.nixl_agent("hct-trial", nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend(plugin, {})
    fd = nameless_file(directory, 0)
    agent.register_memory([(0, _NBYTES, fd, "")], "FILE", [plugin])
    return f"{plugin} starts and takes a file here, but no part of this version moves GPU memory yet"


_TRIALS: dict[str, Callable[..., str]] = {
    "nixl_posix": nixl_posix,
    "nixl_gds": nixl_gds,
    "kvikio_host": kvikio_host,
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
