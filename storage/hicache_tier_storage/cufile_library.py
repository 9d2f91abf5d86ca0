"""cuFile's library: where plug-ins look for it, and what the machine lets it do."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache
from pathlib import Path

NAME = "libcufile.so.0"
_NVIDIA_FS = Path("/proc/driver/nvidia-fs")
_UDEV = Path("/run/udev")
_BLOCK_DEVICES = Path("/sys/dev/block")
_ALLOW_COMPAT_MODE = 1  # of CUFileBoolConfigParameter_t in cufile.h


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


class _Status(ctypes.Structure):
    _fields_ = (("cufile", ctypes.c_int), ("cuda", ctypes.c_int))


def forbid_compatibility() -> str:
    """Tell cuFile of this process to fail rather than copy through host memory; return why it cannot, or "".

    For a trial in a process of its own, before anything opens cuFile's driver.
    """
    why = preload_cufile()
    if why:
        return why
    try:
        call = ctypes.CDLL(NAME).cuFileSetParameterBool
    except (OSError, AttributeError):
        return "this version of cuFile cannot be told to do without host memory"
    call.restype, call.argtypes = _Status, [ctypes.c_int, ctypes.c_bool]
    status = call(_ALLOW_COMPAT_MODE, False)
    return f"cuFile does not take the setting (error {status.cufile})" if status.cufile else ""


def why_no_gpudirect(directory: Path) -> str:
    """Return why cuFile cannot reach the disk below a directory without host memory, or "" where it may.

    It does so by the driver nvidia-fs, or by PCI peer-to-peer from NVMe drives; only a trial tells whether
    it does.
    """
    if _NVIDIA_FS.exists() or _on_nvme(directory):
        return ""
    return "no nvidia-fs driver, and the directory is not on an NVMe drive"


def _on_nvme(directory: Path) -> bool:
    number = directory.stat().st_dev
    device = _BLOCK_DEVICES / f"{os.major(number)}:{os.minor(number)}"
    try:
        names = [str(device.resolve()), *(path.name for path in (device / "slaves").glob("*"))]
    except OSError:
        return False
    return any("nvme" in name for name in names)


def facts() -> list[str]:
    """Say what stands between GPU memory and a disk, in words for a person."""
    said = []
    if not _NVIDIA_FS.exists():
        said.append("no nvidia-fs driver")
    if not _UDEV.is_dir():
        said.append("no /run/udev: cuFile cannot tell the file system")
    return said
