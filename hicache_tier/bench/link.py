"""How much the link to a directory's device can carry: figures above it are not of the device."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = Path("/sys/dev/block")
# Bits that carry data of those sent, by speed in GT/s: 8b/10b up to 5, 128b/130b from 8, FLIT from 64.
_CODING = ((5.0, 8 / 10), (32.0, 128 / 130), (64.0, 236 / 256))


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """The link of the device, or devices, under a directory.

    Attributes
    ----------
    gb_s : float or None
        What it carries in one direction, GB/s; None where that cannot be told.
    source : str
        Where that is known from, or why it is not.
    """

    gb_s: float | None
    source: str

    def exceeded_by(self, gb_s: float) -> bool:
        """Whether a figure is above what the link can carry."""
        return self.gb_s is not None and gb_s > self.gb_s


def device_link(root: Path, *, block: Path = _BLOCK) -> DeviceLink:
    """Find out from sysfs what the PCIe link under a directory can carry.

    Parameters
    ----------
    root : Path
    block : Path
        Where block devices are listed by number.
    """
    device = root.stat().st_dev
    entry = block / f"{os.major(device)}:{os.minor(device)}"
    if not entry.exists():
        return DeviceLink(None, "the file system names no block device")
    found = [_pcie(disk) for disk in _disks(entry.resolve())]
    known = [link for link in found if link is not None]
    if not known or len(known) < len(found):
        return DeviceLink(None, "the block device tells no PCIe link (virtual or network disk)")
    return DeviceLink(sum(gb_s for gb_s, _ in known), ", ".join(text for _, text in known))


def _disks(device: Path) -> list[Path]:
    """Return the devices that a mapped or striped one lies on, or itself."""
    whole = device if (device / "queue").exists() else device.parent  # a partition lies in its disk
    slaves = sorted((whole / "slaves").glob("*"))
    return [disk for slave in slaves for disk in _disks(slave.resolve())] or [whole]


def _pcie(disk: Path) -> tuple[float, str] | None:
    """Return GB/s and description of the nearest PCIe link above a disk."""
    for folder in (disk, *disk.parents):
        try:
            speed = (folder / "current_link_speed").read_text().strip()
            width = int((folder / "current_link_width").read_text())
        except (OSError, ValueError):
            continue
        transfers = re.match(r"([\d.]+) GT/s", speed)
        if transfers is None or not width:
            return None
        gt_s = float(transfers[1])
        coding = next((share for most, share in _CODING if gt_s <= most), _CODING[-1][1])
        return gt_s * coding * width / 8, f"{folder.name}: PCIe {gt_s:g} GT/s x{width}"
    return None
