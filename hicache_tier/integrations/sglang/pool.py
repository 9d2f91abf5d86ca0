"""One registered pool: its pages in host memory, and the store that they go to."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_tier.tier.store import error_kind
from hicache_tier_storage import open_store
from hicache_tier_storage.status import ABSENT, LOADED, PageStatus, failed

from .diagnosis import KEYS
from .facts import labelled, server_facts
from .kinds import packs_draft
from .memory import CallPages, marker_pages, pool_pages, tensor_pages
from .pace import Pace
from .verdicts import kinds_of, moved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from numpy.typing import NDArray

    from hicache_tier_storage import ByteEngine, PageStore

    from .options import Options
    from .ranks import Ranks
    from .view import PoolView

_LOG = logging.getLogger(__name__)
LATE = failed("late")
_BATCH_NBYTES = (
    64 << 20
)  # what is read or written before the verdicts are noted; bounds what a deadline costs


@dataclass(slots=True)
class Pages:
    """Pages of one pool in one call, and their verdicts as they come in.

    Attributes
    ----------
    pool : Pool
    names : list of bytes
        Keys of the store.
    memory : CallPages
    parents : list of bytes or None, optional
        Keys of the pages before each in its chain.
    status : list of PageStatus
    kinds : dict
        How many verdicts of which kind there are, where the store gave all of them at once; else empty.
    """

    pool: Pool
    names: list[bytes]
    memory: CallPages
    parents: list[bytes | None] | None = None
    status: list[PageStatus] = field(init=False)
    kinds: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with every page late."""
        self.status = [LATE] * len(self.names)
        self.kinds = {}

    def get(self) -> None:
        """Load them; on a thread of the lane for reads."""
        if self.pool.view.marker:
            self.status[:] = [LOADED if there else ABSENT for there in self.pool.store.contains(self.names)]
            return
        self._in_parts("get", self._get)

    def put(self) -> None:
        """Store them; on a thread of the lane for writes."""
        self._in_parts("set", self._put)

    def _get(self, part: slice) -> list[PageStatus]:
        return self.pool.store.get(self.names[part], self.memory, np.arange(part.start, part.stop))

    def _put(self, part: slice) -> list[PageStatus]:
        numbers = np.arange(part.start, part.stop)
        return self.pool.store.put(self.names[part], self.memory, numbers, parents=self._parents(part))

    def _parents(self, part: slice) -> list[bytes | None] | None:
        return None if self.parents is None else self.parents[part]

    def _in_parts(self, op: str, move: Callable[[slice], list[PageStatus]]) -> None:
        """Call the store for as much at a time as it does well within a deadline, and note the verdicts."""
        at, pace = 0, self.pool.paces[op]
        while at < len(self.names) and not self.memory.lease.ended:
            part = slice(at, min(at + pace.pages, len(self.names)))
            started_s = time.perf_counter()
            try:
                verdicts = move(part)
            except Exception as error:  # noqa: BLE001 - a fault is a miss with a reason, whatever it is
                _LOG.error(
                    "%s of pool %s failed: %s: %s", op, self.pool.view.name, type(error).__name__, error
                )
                verdicts = [failed(f"error: {error_kind(error)}")] * (part.stop - part.start)
            kinds = kinds_of(verdicts)
            self.status[part] = verdicts
            if len(verdicts) == len(self.names):
                self.kinds = kinds
            pace.learn(moved(kinds), time.perf_counter() - started_s)
            at = part.stop


class Pool:
    """A registered pool.

    Parameters
    ----------
    view : PoolView
    options : Options
    ranks : Ranks
    arguments : dict
        The server's.
    engine : ByteEngine, optional
        Instead of the one that the options name.

    Attributes
    ----------
    view : PoolView
    store : PageStore
    page_nbytes : int
    paces : dict
        How many pages at a time are loaded (`get`) and stored (`set`).
    """

    def __init__(
        self,
        view: PoolView,
        options: Options,
        ranks: Ranks,
        arguments: dict[str, Any],
        *,
        engine: ByteEngine | None = None,
    ) -> None:
        self.view = view
        self.replicated = ranks.replicated and view.name != "mamba" and not _cut_by_heads(view)
        one_byte = getattr(getattr(view.pool, "dtype", None), "itemsize", 1) == 1
        draft = view.name.startswith("draft") or packs_draft(view.pool)
        facts = view.facts | server_facts(arguments, one_byte=one_byte, draft=draft)
        path = arguments.get("model_path")
        tagged = f"{path}-{view.facts.get('storage_format_tag')}"  # as SGLang tags names
        if options.model is None and isinstance(path, str) and ranks.model not in {path, tagged}:
            facts["model_path"] = path  # the name is one that the operator chose to serve it under
        if view.sharded and not self.replicated and not _cut_by_heads(view):
            facts |= {"tp": [ranks.tp[0], ranks.tp[1]]}
        self.store: PageStore = open_store(
            options.root if isinstance(options.root, str) else list(options.root),
            view.geometry,
            view.layout,
            model=labelled(options.model or ranks.model, facts),
            revision=options.revision,
            tenant=options.tenant,
            adapter=options.adapter,
            scales=options.scales,
            rope=options.rope,
            key_algorithm=KEYS,
            tp=ranks.tp,
            pp=ranks.pp,
            cp=ranks.cp,
            pool=view.name,
            capacity_bytes=options.capacity_bytes,
            deadline_s=None,  # the desk has threads and deadlines of its own
            engine=engine or options.engine,
            io_mode=options.io_mode,
            threads=options.threads,
            verify=options.verify,
            checksums=options.checksums,
            read_only=options.read_only,
            access=options.access,
            owners=options.owners,
            encryption=options.encryption,
        )
        self.page_nbytes = view.geometry.page_nbytes
        self.paces = {op: Pace(self.page_nbytes, options.deadline_s) for op in ("get", "set")}

    # -- pages of a call -------------------------------------------------------------------------------------

    def in_place(self, names: list[bytes], pages: NDArray[np.int64]) -> Pages:
        """Return pages where they lie in the pool."""
        memory = marker_pages(self.view, len(names)) if self.view.marker else pool_pages(self.view, pages)
        return Pages(self, names, memory)

    def in_tensors(self, names: list[bytes], tensors: Sequence[torch.Tensor]) -> Pages:
        """Return pages in tensors."""
        if self.view.marker:
            return Pages(self, names, marker_pages(self.view, len(names)))
        return Pages(self, names, tensor_pages(self.view, tensors))

    # -- looking up ------------------------------------------------------------------------------------------

    def match(self, names: list[bytes]) -> int:
        """Count the leading pages that are there, from memory."""
        return self.store.match_prefix(names, follow=False)

    def contains(self, names: list[bytes]) -> list[bool]:
        """Tell for each page whether it is there, from memory."""
        return self.store.contains(names, follow=False)

    def probe(self, names: Sequence[bytes]) -> bool:
        """Read one of these pages, or any, to memory of its own; say whether storage answered."""
        store = self.store
        there = [
            name for name, present in zip(names, store.contains(names, follow=False), strict=True) if present
        ]
        name = there[0] if there else _any_page(store)
        if name is None or self.view.marker:
            store.follow()
            return True
        page = np.zeros(self.view.geometry.page_nbytes, np.uint8)
        rows = np.array([[page.ctypes.data]], np.int64)
        lengths = np.array([len(page)], np.int64)
        memory = CallPages(self.view.geometry, self.view.layout, rows.__getitem__, lengths, keep=page)
        (status,) = store.get([name], memory, [0])
        return bool(status) or status.kind not in {"timeout", "io_error"}


def _cut_by_heads(view: PoolView) -> bool:
    return view.sharded and view.geometry.kind.value == "mha"


def _any_page(store: PageStore) -> bytes | None:
    for table in store.tables(follow=False):
        for _ in range(3):
            try:
                return next(iter(table), None)
            except RuntimeError:  # it grew meanwhile
                time.sleep(0.001)
    return None
