"""What an open store counts and measures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .encryption import ALGORITHM

if TYPE_CHECKING:
    from .capacity import RootBudget
    from .core import StoreCore
    from .identity import Identity


def stats_of(core: StoreCore, identity: Identity, budget: RootBudget) -> dict[str, Any]:
    """Return counters and gauges as plain data; see `PageStore.stats`."""
    with core.briefly():
        writer = core.writer
        verdicts: dict[str, dict[str, int]] = {"put": {}, "get": {}, "delete": {}}
        for (verb, reason), count in core.counts.items():
            verdicts[verb][reason] = count
        shape = writer.facts.shape if writer else None
        return {
            **verdicts,
            "engine": core.engine.name,
            "mode": core.engine.mode,
            "device_mode": core.devices.mode,
            "namespace": identity.namespace,
            "encryption": ALGORITHM if identity.encrypted else None,
            "partition": writer.name if writer else None,
            "pages": len(core.index),
            "pages_other_writers": len(core.foreign.index),
            "page_nbytes": core.geometry.page_nbytes,
            "capacity_bytes": budget.capacity_nbytes,
            "allocated_bytes": len(writer.slabs) * shape.file_nbytes if writer and shape else 0,
            "live_bytes": len(core.index) * shape.stride if shape else 0,
            "evictions": writer.evictions if writer else 0,
            "stranded_slots": writer.stranded if writer else 0,
            "slabs_dropped": core.slabs_dropped,
            "suspect_pages": int(writer.suspect.sum()) if writer else 0,
            "damage": [
                *(writer.damage if writer else ()),
                *(line for part in core.foreign.partitions.values() for line in part.damage),
            ],
        }
