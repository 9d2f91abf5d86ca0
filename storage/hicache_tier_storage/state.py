"""State block of a partition: 4096 bytes, one Zarr chunk (`state/c.0`)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from hicache_tier.errors import FormatVersionError, StoreError

from .inside import ARRAY_FILE, NotPlainError, read_inside

STATE_NBYTES = 4096
_MAGIC = b"HCTSTATE"
_VERSION = 1
_BODY = struct.Struct("<16s16sIIB7xQQQQQ")  # bytes 16..103; 104..511 are zero


def boot_id() -> bytes:
    """16 bytes that name this boot of this host's kernel."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return bytes.fromhex(text.strip().replace("-", ""))


@dataclass(frozen=True, slots=True)
class StateBlock:
    """What a partition's writer states at open and at close.

    Attributes
    ----------
    store_uuid, boot_id : bytes
        16 bytes each. `boot_id` is the boot under which every unverified page was written.
    pid, epoch : int
        Of the writer; `epoch` counts its opens.
    clean : bool
        True once the writer has closed and synced.
    sequence : int
        Highest commit sequence at the time of writing.
    slots_per_slab, stride, page_nbytes, capacity : int
        Geometry of the slabs; bytes, and `capacity` in slots.
    """

    store_uuid: bytes
    boot_id: bytes
    pid: int
    epoch: int
    clean: bool
    sequence: int
    slots_per_slab: int
    stride: int
    page_nbytes: int
    capacity: int

    def pack(self) -> bytes:
        """Return the 4096 bytes."""
        body = _BODY.pack(
            self.store_uuid,
            self.boot_id,
            self.pid,
            self.epoch,
            self.clean,
            self.sequence,
            self.slots_per_slab,
            self.stride,
            self.page_nbytes,
            self.capacity,
        ).ljust(512 - 16, b"\0")
        head = _MAGIC + struct.pack("<II", _VERSION, google_crc32c.value(body))
        return (head + body).ljust(STATE_NBYTES, b"\0")

    @classmethod
    def read(cls, path: Path) -> StateBlock:
        """Read a partition's.

        Raises
        ------
        FormatVersionError
            For a later version.
        StoreError
            Where it is damaged or something else.
        OSError
            Where it cannot be read.
        """
        try:
            raw = read_inside(path, ARRAY_FILE, STATE_NBYTES)
        except NotPlainError as error:
            raise StoreError(f"{path.name}: not a state block: {error.strerror}.") from error
        return cls.unpack(raw, f"{path.parent.name}/{path.name}")

    @classmethod
    def unpack(cls, raw: bytes, where: object) -> StateBlock:
        """Read 4096 bytes.

        Raises
        ------
        FormatVersionError
            For a later version.
        StoreError
            Where the block is cut, damaged or something else.
        """
        if len(raw) != STATE_NBYTES or raw[:8] != _MAGIC:
            raise StoreError(f"{where}: not a state block ({len(raw)} bytes).")
        version, crc = struct.unpack_from("<II", raw, 8)
        if version > _VERSION:
            raise FormatVersionError(
                f"{where}: state block version {version}; this release reads up to {_VERSION}. "
                "Upgrade to open it."
            )
        body = raw[16:512]
        if google_crc32c.value(body) != crc:
            raise StoreError(f"{where}: the state block's checksum is wrong.")
        fields = _BODY.unpack_from(body)
        uuid, boot, pid, epoch, clean, sequence, slots, stride, page_nbytes, capacity = fields
        return cls(uuid, boot, pid, epoch, bool(clean), sequence, slots, stride, page_nbytes, capacity)
