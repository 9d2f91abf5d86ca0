"""A process that writes to a store what it should not."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from hicache_tier_storage.capacity import partition_paths

from .board import Field, Phase
from .pages import BATCH
from .worker import Worker

_STRANGE_S = 0.5  # between two pages that it writes


class Stranger(Worker):
    """Writes pages as a Zarr library does that knows nothing of us: it replaces slabs, or tears them."""

    def work(self) -> None:
        """Write to any page of any partition."""
        import zarr

        self.board[Field.PHASE] = Phase.RUNNING
        time.sleep(self.random.uniform(0, 2 * _STRANGE_S))
        places = list(partition_paths(Path(self.duty.root))) if Path(self.duty.root).is_dir() else []
        if not places:
            return
        try:
            pages = zarr.open_array(self.random.choice(places).pages, mode="r+")
            pages[self.random.randrange(BATCH)] = np.full(pages.shape[1:], 7, pages.dtype)
        except Exception:  # noqa: BLE001 - a library of others, on files that are damaged
            self.board.add(Field.REFUSED, 1)
        else:
            self.board.add(Field.FOREIGN_WRITES, 1)
