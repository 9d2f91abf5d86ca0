"""One run of `bench replay`: sizes, the store of this project, and peers with the same sizes."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_tier.layout import Layout
from hicache_tier.memory import check_budget
from hicache_tier_storage import open_store

from .errors import BenchError
from .link import device_link
from .replay_models import model_geometry
from .replay_peers import PEERS, check_peers
from .replay_run import ReplayShape, replay
from .replay_summary import summary
from .storage_session import host_facts
from .trace_generator import generate
from .trace_statistics import describe, ideal_hits
from .traces import read_trace
from .transfer_session import find_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_tier_storage import PageStore

GENERATED = "generated"
_SPARE = 1.25  # of the bytes of all distinct pages, so that rounding to slabs evicts none
_HOST_SHARE = 4
_IN_FLIGHT_PAGES = 256


@dataclass(frozen=True, slots=True)
class ReplayWish:
    """What a user asked for.

    Attributes
    ----------
    trace : str
        Path of a trace, or `generated`.
    requests : int or None
        How many of them; None: all of a file, 1,000 generated ones.
    seed : int
        Of generated ones.
    root : Path
        Directory for the stores.
    model, layout, policy, prefetch, engine, io_mode, device : str
    page_tokens, pages_a_block, device_pages : int
    host_nbytes, capacity_nbytes : int or None
        Of the host pool and the store; None: a quarter of all distinct pages, and all of them with room to
        spare.
    speed, lookup_timeout_s : float
        As of `ReplayShape`.
    peers : sequence of str
        Names in `replay_peers.PEERS`.
    """

    trace: str
    requests: int | None
    seed: int
    root: Path
    model: str
    layout: str
    policy: str
    prefetch: str
    engine: str
    io_mode: str
    device: str
    page_tokens: int
    pages_a_block: int
    device_pages: int
    host_nbytes: int | None
    capacity_nbytes: int | None
    speed: float
    lookup_timeout_s: float
    peers: Sequence[str]


class ReplaySession:
    """Checks the whole wish when it is made, before anything is written.

    Raises
    ------
    HiCacheTierError
        Where the trace is wrong, something asked for is not there, or a pool or the disk is too small.
    """

    def __init__(self, wish: ReplayWish) -> None:
        self._wish = wish
        check_peers(wish.peers)
        if wish.trace == GENERATED:
            self._requests = generate(wish.requests or 1000, wish.seed)
        else:
            self._requests = read_trace(Path(wish.trace), wish.requests)
        self._facts = describe(self._requests)
        self._shape = self._sized()

    def __len__(self) -> int:
        """Count the steps of `run`."""
        return len(self._requests) * (1 + len(self._wish.peers))

    def run(self, tick: Callable[[], None]) -> dict[str, Any]:
        """Replay; `tick` is called after each request of each store. What was written is removed."""
        wish, shape = self._wish, self._shape
        ideal = ideal_hits(self._requests)
        with self._folder() as folder, self._store(folder / "store") as store:
            found = summary(replay(self._requests, shape, store, tick), shape, ideal)
            stats = store.stats()
        peers = []
        for name in wish.peers:
            with self._folder() as folder:
                peer = PEERS[name].make(folder / "pages", shape.geometry, shape.layout, shape.capacity_nbytes)
                outcome = replay(self._requests, shape, peer, tick)
            peers.append({"peer": name, **summary(outcome, shape, ideal)})
        return {
            **found,
            "store": {"engine": stats["engine"], "mode": stats["mode"]},
            "peers": peers,
            "trace": {"name": Path(wish.trace).name, **self._facts},
            "model": {
                "name": wish.model,
                "page_tokens": wish.page_tokens,
                "pages_a_block": wish.pages_a_block,
                "page_nbytes": shape.geometry.page_nbytes,
                "layout": shape.layout.value,
            },
            "tier": {
                name: getattr(wish, name) for name in ("policy", "prefetch", "lookup_timeout_s", "speed")
            },
            "host": host_facts(wish.root, device_link(wish.root)),
        }

    def _sized(self) -> ReplayShape:
        """Return sizes that hold the trace, or say what does not fit."""
        wish = self._wish
        geometry = model_geometry(wish.model, wish.page_tokens)
        longest = max(len(request.blocks) for request in self._requests) * wish.pages_a_block
        distinct = self._facts["distinct_blocks"] * wish.pages_a_block
        least = 2 * longest + _IN_FLIGHT_PAGES
        host_pages = max(distinct // _HOST_SHARE, 2 * least)
        if wish.host_nbytes is not None:
            host_pages = wish.host_nbytes // geometry.page_nbytes
            if host_pages < least:
                raise BenchError(
                    f"--host-size is {host_pages} pages of {geometry.page_nbytes} bytes; the longest prompt "
                    f"has {longest}, and with what is under way at least {least} are needed."
                )
        if 0 < wish.device_pages < longest:
            raise BenchError(
                f"--device-pages is {wish.device_pages}, and the longest prompt has {longest} pages."
            )
        capacity = wish.capacity_nbytes or int(_SPARE * distinct * geometry.page_nbytes) + (64 << 20)
        free = shutil.disk_usage(wish.root).free
        if capacity > free:
            raise BenchError(
                f"the store would need {capacity / 1e9:.1f} GB; {wish.root} has {free / 1e9:.1f} GB free. "
                "Use fewer --requests, a smaller --model or --page-tokens, or less --capacity."
            )
        device = find_device(wish.device)
        on_host = host_pages + (max(wish.device_pages, longest) if device.type == "cpu" else 0)
        check_budget(on_host * geometry.page_nbytes)
        return ReplayShape(
            geometry=geometry,
            layout=Layout.parse(wish.layout),
            device=device,
            pages_a_block=wish.pages_a_block,
            longest=longest,
            device_pages=wish.device_pages,
            host_pages=host_pages,
            capacity_nbytes=capacity,
            policy=wish.policy,
            prefetch=wish.prefetch,
            speed=wish.speed,
            lookup_timeout_s=wish.lookup_timeout_s,
        )

    def _store(self, root: Path) -> PageStore:
        wish, shape = self._wish, self._shape
        return open_store(
            root,
            shape.geometry,
            shape.layout,
            model=wish.model,
            capacity_bytes=shape.capacity_nbytes,
            engine=wish.engine,
            io_mode=wish.io_mode,
        )

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(prefix="hct-replay-", dir=self._wish.root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
