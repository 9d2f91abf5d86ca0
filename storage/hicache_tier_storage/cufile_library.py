"""cuFile's library: where plug-ins look for it, and what the machine lets it do."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

NAME = "libcufile.so.0"
_NVIDIA_FS = Path("/proc/driver/nvidia-fs")
_UDEV = Path("/run/udev")


@cache
def preload_cufile() -> str:
    """Load libcufile so that plug-ins of NIXL find it; return why it cannot be loaded, or "".

    It is looked for where the system has it, and in the packages that pip installs it in.
    """
    for path in (NAME, *_in_packages()):
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return ""
    return f"{NAME} cannot be loaded (install nvidia-cufile, or add it to LD_LIBRARY_PATH)"


def _in_packages() -> list[Path]:
    """Return the places where `nvidia-cufile` and `nvidia-cufile-cu12` put it."""
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return [path for folder in folders for path in sorted(Path(folder).glob(f"*/lib/{NAME}"))]


def gpudirect() -> str:
    """Return how cuFile reaches a disk: `nvidia-fs`, or "" where it copies through host memory.

    Without the driver it moves bytes in its compatibility mode, which works the same and is no faster than
    a copy of one's own.
    """
    return "nvidia-fs" if _NVIDIA_FS.exists() else ""


def facts() -> list[str]:
    """Say what decides between true GPUDirect, compatibility mode, and none."""
    said = []
    if not gpudirect():
        said.append("no nvidia-fs driver: cuFile copies through host memory (compatibility mode)")
    if not _UDEV.is_dir():
        said.append("no /run/udev: cuFile cannot tell the file system")
    return said
