"""One run of `bench storage`: every shape by every source, and what may be said of the figures."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_tier.layout import Layout

from .link import DeviceLink, device_link
from .page_cache import Cache, ways
from .peers import chosen_peers
from .storage_cases import StorageCase, shapes
from .storage_own_work import bookkeeping, opening
from .storage_sources import chosen_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .storage_cases import StorageShape
    from .storage_sources import Source

_SAME_SHAPE = (
    "direction",
    "read_percent",
    "page_nbytes",
    "pages",
    "mode",
    "cache",
    "checksums",
    "encrypted",
    "threads",
    "depth",
)


@dataclass(frozen=True, slots=True)
class StorageWish:
    """What a user asked for.

    Attributes
    ----------
    root : Path
    cases, modes, peers : sequence of str
        As on the command line.
    engine : str
        A name in `storage_sources.SOURCES`, or `all`.
    layout : str
    threads, depths, mixes : sequence of int
        I/O threads; pages a call (empty: a case in one call); per cent of reads of mixed rows.
    repeats : int
        Turns of which the medians count.
    slots : int
        Of the store whose opening is timed; 0 leaves out what is measured besides throughput.
    allow_cached : bool
        Give warm figures too, and those above the link.
    encryption : bool
        Measure encrypted pages too.
    link_gb_s : float or None
        What the device's link carries, GB/s, where the machine does not tell.
    """

    root: Path
    cases: Sequence[str]
    modes: Sequence[str]
    engine: str
    peers: Sequence[str]
    layout: str
    threads: Sequence[int]
    depths: Sequence[int]
    mixes: Sequence[int]
    repeats: int
    slots: int
    allow_cached: bool
    link_gb_s: float | None
    encryption: bool = False


class StorageSession:
    """Checks the whole wish when it is made, before anything is measured.

    Raises
    ------
    HiCacheTierError
        Where something asked for cannot be measured.
    """

    def __init__(self, wish: StorageWish) -> None:
        self._wish = wish
        self._link = (
            device_link(wish.root) if wish.link_gb_s is None else DeviceLink(wish.link_gb_s, "as given")
        )
        layout = Layout.parse(wish.layout).value
        cases = [StorageCase.parse(text) for text in wish.cases]
        depths = wish.depths or (max(case.pages for case in cases),)
        self._peers, self._peers_left_out = chosen_peers(wish.peers)
        found = ways(wish.root, wish.modes, allow_cached=wish.allow_cached)
        self._shapes = shapes(cases, found, wish.threads, depths, layout, encrypted=wish.encryption)
        self._sources, self._left_out = chosen_sources(wish.root, wish.engine)

    def __len__(self) -> int:
        """Count the steps of `run`."""
        return len(self._steps())

    def run(self, tick: Callable[[], None]) -> dict[str, Any]:
        """Measure; `tick` is called after each step. What was written is removed."""
        wish = self._wish
        rows: list[dict[str, Any]] = []
        peers: list[dict[str, Any]] = []
        for shape, source in self._steps():
            bench = source.make(wish.root, shape)
            try:
                bench.check()
                rows += bench.rows(wish.repeats, wish.mixes)
                if self._peers and shape.bare and source is self._sources[0]:
                    peers += bench.against(self._peers, wish.repeats)
            finally:
                bench.close()
            tick()
        good, refused = self._judged(rows)
        _compare(good)
        result = {
            "rows": good,
            "refused": refused,
            "peers": peers,
            "host": host_facts(wish.root, self._link),
            "left_out": self._left_out,
            "peers_left_out": self._peers_left_out,
        }
        if wish.slots:
            result["bookkeeping"] = bookkeeping(wish.root, wish.repeats)
            result["opening"] = opening(wish.root, wish.slots, 3)
        return result

    def _steps(self) -> list[tuple[StorageShape, Source]]:
        """Return what is measured, in order."""
        return [
            (shape, source)
            for shape in self._shapes
            for source in self._sources
            if source.encrypts or not shape.encrypted
        ]

    def _judged(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Part rows that may stand from those above the link, which lose their figures."""
        good, refused = [], []
        for row in rows:
            above = self._link.exceeded_by(max(row["gb_s"], row["bare_gb_s"]))
            if not above or self._wish.allow_cached:
                good.append(row | {"above_link": above})
                continue
            facts = {name: row[name] for name in ("engine", *_SAME_SHAPE)}
            reason = (
                f"above the device's link ({self._link.gb_s:.1f} GB/s, {self._link.source}), so not of the "
                "device; --allow-cached gives such figures"
            )
            refused.append(facts | {"reason": reason})
        return good, refused


def host_facts(root: Path, link: DeviceLink) -> dict[str, Any]:
    """Return what the figures were measured on."""
    from hicache_tier_storage.probe import filesystem

    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "filesystem": filesystem(root),
        "link_gb_s": link.gb_s,
        "link": link.source,
    }


def cache_words(cache: str) -> str:
    """Return what a row's `cache` means, for people."""
    return {
        Cache.BYPASSED: "page cache bypassed (O_DIRECT)",
        Cache.DROPPED: "page cache dropped before each turn (seen by mincore), writes timed to the device",
        Cache.WARM: "through the page cache: memory, not the device",
    }[Cache(cache)]


def _compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row what it is of `posix`, and of the same without encryption where it has that.

    All are measured as ratios to the bare loop in turn with them.
    """
    posix = {
        tuple(row[name] for name in _SAME_SHAPE): row["ratio_to_bare"]
        for row in rows
        if row["engine"] == "posix"
    }
    for row in rows:
        base = posix.get(tuple(row[name] for name in _SAME_SHAPE))
        row["ratio_to_posix"] = row["ratio_to_bare"] / base if base else None
    plain = {
        (row["engine"], *(row[name] for name in _SAME_SHAPE)): row["ratio_to_bare"]
        for row in rows
        if not row["encrypted"]
    }
    for row in rows:
        same = row | {"encrypted": False}
        base = plain.get((row["engine"], *(same[name] for name in _SAME_SHAPE)))
        row["ratio_to_plain"] = row["ratio_to_bare"] / base if base and row["encrypted"] else None
