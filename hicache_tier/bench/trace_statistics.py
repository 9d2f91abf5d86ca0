"""What a trace is like: lengths, reuse, and what a cache that never forgets would have had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .traces import Request

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


def ideal_hits(requests: Sequence[Request]) -> list[int]:
    """Return for each request how many leading blocks came before: the hits of an LRU without a bound."""
    seen: set[int] = set()
    hits = []
    for request in requests:
        count = next((i for i, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        seen.update(request.blocks)
        hits.append(count)
    return hits


def ideal_hit_rate(requests: Sequence[Request]) -> float:
    """Return the share of blocks that an LRU without a bound would have had."""
    return sum(ideal_hits(requests)) / sum(len(request.blocks) for request in requests)


def describe(requests: Sequence[Request]) -> dict[str, Any]:
    """Return what is compared between a real trace and a generated one.

    Returns
    -------
    dict
        `requests`, `blocks`, `distinct_blocks`, `seconds`, `ideal_hit_rate`, `returning` (the share of
        requests with more than the first block in common with an earlier one), and quantiles by level
        (`LEVELS`) of `input_tokens`, `output_tokens`, `hit_blocks` and `new_blocks` a request.
    """
    hits = ideal_hits(requests)
    lengths = [len(request.blocks) for request in requests]
    new = [length - hit for length, hit in zip(lengths, hits, strict=True)]
    return {
        "requests": len(requests),
        "blocks": sum(lengths),
        "distinct_blocks": len({block for request in requests for block in request.blocks}),
        "seconds": (requests[-1].timestamp_ms - requests[0].timestamp_ms) / 1e3,
        "ideal_hit_rate": sum(hits) / sum(lengths),
        "returning": sum(hit > 1 for hit in hits) / len(hits),
        "input_tokens": _quantiles([request.input_tokens for request in requests]),
        "output_tokens": _quantiles([request.output_tokens for request in requests]),
        "hit_blocks": _quantiles(hits),
        "new_blocks": _quantiles(new),
    }


def _quantiles(values: Sequence[int]) -> dict[str, float]:
    return {f"{level:g}": float(np.quantile(values, level)) for level in LEVELS}
