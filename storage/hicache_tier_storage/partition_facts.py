"""What a partition says of itself, and what cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_tier.errors import StoreError
from hicache_tier.geometry import KVGeometry

from .encryption import stated_check
from .inside import PARTITION_FILE
from .metadata import read_attributes
from .slab import SLAB_TARGET_NBYTES, SLOT_ALIGNMENT, SlabShape
from .table import table_nbytes

if TYPE_CHECKING:
    from .partition_files import PartitionPaths

MAX_SLAB_NBYTES = 2 * SLAB_TARGET_NBYTES
"""Bytes of the slots of a slab of several pages: what a partition says of itself is not trusted."""
MAX_SLOTS = 1 << 32
"""Slots of a partition: the journal names no others."""
MAX_PAGE_NBYTES = (1 << 32) - 1
"""Bytes of a page that a record can state."""
MAX_TABLE_NBYTES = table_nbytes(MAX_SLAB_NBYTES // SLOT_ALIGNMENT)


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """What a partition's attributes say of it."""

    rank: str
    writer: int
    pool: str
    capacity_nbytes: int
    geometry: KVGeometry
    page_axes: int
    shape: SlabShape
    key_check: str = ""

    @property
    def encrypted(self) -> bool:
        """Whether the pages are encrypted."""
        return bool(self.key_check)

    @classmethod
    def read(cls, paths: PartitionPaths) -> PartitionFacts:
        """Read and check `zarr.json`; raises `StoreError` or a subclass."""
        attributes = read_attributes(paths.root, PARTITION_FILE)
        try:
            geometry = KVGeometry.from_dict(attributes["geometry"])
            stride, slots = int(attributes["stride"]), int(attributes["slots_per_slab"])
            facts = cls(
                str(attributes["rank"]),
                int(attributes["writer"]),
                str(attributes["pool"]),
                int(attributes["capacity_bytes"]),
                geometry,
                int(attributes["page_axes"]),
                SlabShape(geometry.page_nbytes, stride, slots),
                stated_check(attributes, paths.root),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{paths.root}: the partition's attributes are damaged: {error!r}.") from error
        wanted = SlabShape.choose(geometry.page_nbytes, 0).stride
        large = (slots > 1 and slots * stride > MAX_SLAB_NBYTES) or geometry.page_nbytes > MAX_PAGE_NBYTES
        if stride != wanted or slots < 1 or slots & (slots - 1) or large or not 1 <= facts.page_axes <= 8:
            raise StoreError(f"{paths.root}: stride {stride} or {slots} slots a slab cannot be.")
        return facts
