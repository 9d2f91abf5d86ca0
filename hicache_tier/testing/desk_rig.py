"""The SGLang adapter's desk without SGLang, over storage that is slow, hangs or fails as it is told."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hicache_tier.integrations.sglang.desk import Desk
from hicache_tier.integrations.sglang.options import Options
from hicache_tier.integrations.sglang.pool import Pages, Pool
from hicache_tier.integrations.sglang.ranks import Ranks
from hicache_tier.integrations.sglang.tally import Tally
from hicache_tier.integrations.sglang.view import PoolView
from hicache_tier_storage.posix import PosixEngine

from .array_pool import keys_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from hicache_tier_storage.engine import PageBatch

PAGE = 8
PAGES = 32
NAMES = keys_of("desk", 16)


class HostPool:
    """An MHA host pool in layout page_first, as SGLang describes one: `PAGES` pages of `PAGE` slots."""

    layout, dtype, page_size, size = "page_first", torch.float16, PAGE, PAGE * PAGES
    layer_num, head_num, head_dim, v_head_dim, size_per_token = 3, 2, 16, 16, 1

    def __init__(self) -> None:
        self.kv_buffer = torch.zeros(2, self.size, 3, 2, 16, dtype=torch.float16)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return where the pieces of pages lie, and their lengths."""
        row = self.kv_buffer[0, 0].numel() * 2
        base, half = self.kv_buffer.data_ptr(), self.kv_buffer[0].numel() * 2
        firsts = indices.tolist()[::PAGE]
        pointers = [base + first * row + part for first in firsts for part in (0, half)]
        return pointers, [PAGE * row] * len(pointers)

    @property
    def raw(self) -> NDArray[np.uint8]:
        """All bytes."""
        data: NDArray[np.uint8] = self.kv_buffer.view(torch.uint8).reshape(-1).numpy()
        return data


class Moody(PosixEngine):
    """An engine that waits before and after it moves bytes, or fails."""

    lands = False

    def __init__(self) -> None:
        super().__init__(direct=False, threads=2)
        self.delay_s = dict.fromkeys(("read", "write"), 0.0)
        self.free = threading.Event()
        self.free.set()
        self.fails = False
        self.swallows = False
        self.end = threading.Event()
        self.calls: list[str] = []

    def read(self, batch: PageBatch) -> list[str]:
        """Read every page."""
        return self._do("read", super().read, batch)

    def write(self, batch: PageBatch) -> list[str]:
        """Write every page."""
        return self._do("write", super().write, batch)

    def _do(self, op: str, move: Callable[[PageBatch], list[str]], batch: PageBatch) -> list[str]:
        self.calls.append(op)
        if self.swallows:
            self.end.wait(60)
        time.sleep(self.delay_s[op] / 2)
        self.free.wait(30)
        if self.fails:
            return ["io_error: Input/output error"] * len(batch)
        reasons = move(batch)
        time.sleep(self.delay_s[op] / 2)
        return reasons


class Rig:
    """A desk with one pool.

    Parameters
    ----------
    root : path
    engine : Moody or None
        None for the engine that the options name.
    weights : callable
        See `Desk`.
    options
        Of the adapter.
    """

    def __init__(
        self,
        root: object,
        engine: Moody | None,
        weights: Callable[[], object] = lambda: None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        defaults = {"deadline_s": 4, "probe_interval_s": 0.2, "capacity_bytes": "64 MiB", "metrics": False}
        self.options = Options.parse({"root": str(root), **defaults, **options})
        self.host, self.engine = HostPool(), engine
        ranks = Ranks("m", (0, 1), (0, 1), (0, 1), replicated=False, writer=True)
        self.tally = Tally("tp0", None)
        self.desk = Desk(self.options, self.tally, weights=weights)
        self.pool = Pool(PoolView(self.host, "kv"), self.options, ranks, {}, engine=engine)
        self.desk.pools["kv"] = self.pool

    def pages(self, names: list[bytes], pages: Iterable[int]) -> Pages:
        """Return pages of a call."""
        return self.pool.in_place(names, np.array(pages, np.int64))

    def put(self, names: list[bytes], pages: Iterable[int]) -> list[str]:
        """Store pages; a reason for each."""
        return [status.reason for status in self.desk.put([self.pages(names, pages)])[0]]

    def get(self, names: list[bytes], pages: Iterable[int]) -> list[str]:
        """Load pages; a reason for each."""
        return [status.reason for status in self.desk.get([self.pages(names, pages)])[0]]

    def look(self, names: list[bytes]) -> int:
        """Count the leading pages that are stored."""
        return self.pool.match(names) if self.desk.may_look() else 0

    def fill(self, seed: int = 1) -> None:
        """Fill the pool with bytes that follow from a seed."""
        self.host.raw[:] = np.random.default_rng(seed).integers(0, 256, self.host.raw.size, np.uint8)

    def content(self, pages: Iterable[int]) -> list[torch.Tensor]:
        """Return copies of pages."""
        return [self.host.kv_buffer[:, page * PAGE : (page + 1) * PAGE].clone() for page in pages]


def until(so: Callable[[], object], timeout_s: float = 10.0) -> bool:
    """Wait until something is so; say whether it came to that."""
    until_s = time.monotonic() + timeout_s
    while not so():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def same(ours: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Tell whether tensors hold the same bytes."""
    return all(
        torch.equal(one.view(torch.uint8), two.view(torch.uint8))
        for one, two in zip(ours, others, strict=True)
    )
