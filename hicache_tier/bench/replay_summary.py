"""What a replay showed, as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .replay_run import ReplayOutcome, ReplayShape

_POINTS = 200
_GROUPS = {
    "writes": ("dropped_pages", "failed_pages", "lost_pages"),
    "reads": ("failed_pages",),
    "prefetch": ("missing_pages",),
    "inserts": ("skipped_pages",),
    "backup": ("failed_pages",),
    "load": ("failed_pages",),
    "misses": ("pages",),
}
_WAYS = {"device to host": "backup", "host to device": "load"}
_VERBS = {"host to store": "put", "store to host": "get"}


def summary(outcome: ReplayOutcome, shape: ReplayShape, ideal: Sequence[int]) -> dict[str, Any]:
    """Return hit rates, paths, latencies and drops of one store.

    Parameters
    ----------
    outcome : ReplayOutcome
    shape : ReplayShape
    ideal : sequence of int
        Hits of each request in an LRU without a bound, in blocks.
    """
    served = outcome.served
    pages = sum(one.pages for one in served)
    hits = {tier: sum(getattr(one, tier) for one in served) for tier in ("device", "host", "store")}
    sizes = {
        "device": shape.device_pages,
        "host": shape.host_pages,
        "store": shape.capacity_nbytes // shape.geometry.page_nbytes,
    }
    return {
        "requests": len(served),
        "hit_rate": sum(hits.values()) / pages,
        "ideal_hit_rate": sum(ideal) * shape.pages_a_block / pages,
        "tiers": {
            tier: {"capacity_pages": sizes[tier], "hit_pages": hits[tier], "hit_rate": hits[tier] / pages}
            for tier in hits
        },
        "seconds": outcome.seconds,
        "held_seconds": outcome.held_s,
        "flush_seconds": outcome.flush_s,
        "unsaved_pages": outcome.unsaved_pages,
        "pages": pages,
        "checked_pages": sum(one.host + one.store + one.wrong for one in served),
        "wrong_pages": sum(one.wrong for one in served),
        "paths": _paths(outcome),
        "latency_ms": _latencies(outcome),
        "drops": _drops(outcome.stats),
        "evictions": outcome.stats.get("evictions", {}).get("pages", {}),
        "timeline": _timeline(outcome, ideal, shape),
    }


def _paths(outcome: ReplayOutcome) -> dict[str, Any]:
    """Bytes of each way, the seconds it was busy, and GB/s while it was."""
    found = {}
    for way, name in _WAYS.items():
        group = outcome.stats.get(name, {})
        found[way] = _rate(group.get("bytes", 0), group.get("seconds", 0.0))
    for way, verb in _VERBS.items():
        calls = [call for call in outcome.calls if call.verb == verb]
        found[way] = _rate(sum(call.nbytes for call in calls), sum(call.seconds for call in calls))
    return found


def _rate(nbytes: int, seconds: float) -> dict[str, Any]:
    return {"bytes": nbytes, "seconds": seconds, "gb_s": nbytes / seconds / 1e9 if nbytes else None}


def _latencies(outcome: ReplayOutcome) -> dict[str, Any]:
    """Percentiles, ms: what the engine waited for, and calls of the store."""
    served = outcome.served
    return {
        "match": _percentiles(one.match_s for one in served),
        "load": _percentiles(one.load_s for one in served if one.host + one.store),
        "insert": _percentiles(one.insert_s for one in served),
        "store put call": _percentiles(call.seconds for call in outcome.calls if call.verb == "put"),
        "store get call": _percentiles(call.seconds for call in outcome.calls if call.verb == "get"),
    }


def _percentiles(seconds: Iterable[float]) -> dict[str, Any]:
    values = np.array(list(seconds)) * 1e3
    if not len(values):
        return {"count": 0}
    return {"count": len(values)} | {
        f"p{level}": float(np.percentile(values, level)) for level in (50, 95, 99)
    }


def _drops(stats: dict[str, Any]) -> dict[str, int]:
    """Pages that did not get where they should, by what happened and why; absent ones are plain misses."""
    found: dict[str, int] = {}
    for group, counters in _GROUPS.items():
        for counter in counters:
            value = stats.get(group, {}).get(counter, 0)
            by_reason = value if isinstance(value, dict) else {"": value}
            for reason, count in by_reason.items():
                if count and reason != "absent":
                    found[".".join(filter(None, (group, counter, reason)))] = int(count)
    return found


def _timeline(outcome: ReplayOutcome, ideal: Sequence[int], shape: ReplayShape) -> list[dict[str, Any]]:
    """Return up to 200 points: sums from the start up to each."""
    served = outcome.served
    pages = np.cumsum([one.pages for one in served])
    tiers = {tier: np.cumsum([getattr(one, tier) for one in served]) for tier in ("device", "host", "store")}
    best = np.cumsum(ideal) * shape.pages_a_block
    ends = np.array([one.ended_s for one in served]) - outcome.began_s
    moved = {
        verb: np.array(
            sorted(
                (call.ended_s - outcome.began_s, call.nbytes) for call in outcome.calls if call.verb == verb
            )
        ).reshape(-1, 2)
        for verb in _VERBS.values()
    }
    points = np.unique(np.linspace(0, len(served) - 1, min(_POINTS, len(served))).astype(int))
    return [
        {
            "seconds": float(ends[at]),
            "requests": int(at) + 1,
            "ideal_hit_rate": float(best[at] / pages[at]),
            **{f"{tier}_hit_rate": float(sums[at] / pages[at]) for tier, sums in tiers.items()},
            **{
                f"{verb}_bytes": int(table[table[:, 0] <= ends[at], 1].sum()) for verb, table in moved.items()
            },
            "load_ms": served[at].load_s * 1e3,
        }
        for at in points
    ]
