"""Where pinned memory lies: in huge pages, and on the node that the device hangs on.

Both are wishes: a pool works without them, so what cannot be had is a reason in the log, not an error.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hicache_tier_kernels.support import Support

_MBIND_CALLS = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1  # other nodes are used where this one is full
_MASK_BITS = 1024


def use_huge_pages(mapping: mmap.mmap, root: Path = Path("/")) -> Support:
    """Ask for huge pages, which make registering quicker and need fewer entries of the device's tables.

    Parameters
    ----------
    mapping : mmap.mmap
        Not touched yet.
    root : Path
        Where `sys` is; another one in tests.
    """
    setting = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        modes = setting.read_text()
    except OSError:
        return Support(ok=False, reason=f"no huge pages: this kernel has no {setting}")
    if "[never]" in modes:
        return Support(ok=False, reason=f"no huge pages: {setting} says never")
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        return Support(ok=False, reason=f"no huge pages: {error}")
    return Support(ok=True, reason="huge pages where the kernel finds them")


def device_node(index: int, root: Path = Path("/")) -> int | None:
    """Return the memory node that a CUDA device hangs on, or None where the system does not tell."""
    properties: Any = torch.cuda.get_device_properties(index)
    with suppress(AttributeError, OSError, ValueError):  # older torch does not tell the place
        numbers = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        folder = "{:04x}:{:02x}:{:02x}.0".format(*map(int, numbers))
        node = int((root / "sys/bus/pci/devices" / folder / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def prefer_node(address: int, nbytes: int, node: int | None, root: Path = Path("/")) -> Support:
    """Let the kernel take memory of one node first.

    Parameters
    ----------
    address, nbytes : int
        A range of whole pages, not touched yet.
    node : int or None
        None where it is not known.
    root : Path
        Where `sys` is; another one in tests.
    """
    with suppress(OSError):
        if (root / "sys/devices/system/node/online").read_text().strip() == "0":
            return Support(ok=True, reason="one memory node")
    if node is None or node >= _MASK_BITS:
        return Support(ok=False, reason="any memory node: the system does not tell the device's")
    number = _MBIND_CALLS.get(platform.machine())
    if number is None:
        return Support(ok=False, reason=f"any memory node: no mbind known for {platform.machine()}")
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MASK_BITS // word_bits))()
    mask[node // word_bits] = 1 << (node % word_bits)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), _PREFERRED, mask)
    if libc.syscall(ctypes.c_long(number), *arguments, ctypes.c_ulong(_MASK_BITS), ctypes.c_uint(0)):
        code = ctypes.get_errno()
        return Support(ok=False, reason=f"any memory node: mbind failed with errno {code}")
    return Support(ok=True, reason=f"memory node {node}, the device's")
