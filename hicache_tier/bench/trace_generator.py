"""Requests with the lengths and the reuse of a production trace, for those who have none.

The model: requests arrive in ticks of three seconds, a Poisson number in each. All prompts begin with the
same block (the system prompt). A conversation has turns: the next prompt holds the last one and goes on from
it, some return to an earlier point and branch off; who has come back is likelier to come back again. A tick
takes the turns that are due first and fills up with new conversations.

Rate, share of branches, and quantiles of lengths and pauses were measured on Mooncake's conversation trace
(FAST'25, 12,031 requests in an hour); draws lie between the quantiles. The probabilities to come back cannot
be measured within an hour, which cuts conversations off; they are set so that the hit rate of an LRU without
a bound agrees: 0.20 and 0.21 over the first 1,000 requests, 0.37 and 0.37 over all, generated and real.
`trace_statistics.describe` measures a trace, and the tests compare both.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.geometry import positive

from .traces import BLOCK_TOKENS, Request

if TYPE_CHECKING:
    from numpy.random import Generator

_TICK_MS = 3000
_REQUESTS_A_TICK = 10.2
_RETURNS = (0.42, 0.42, 0.42, 0.45, 0.5, 0.55, 0.6)  # by turns so far; the last for all later ones
_BRANCHES = 0.15  # of the returning ones
_MOST_TOKENS = 126_000
_LEVELS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution by its values at `_LEVELS`, straight between them."""

    values: tuple[float, ...]

    def draw(self, random: Generator) -> float:
        """Draw one value."""
        return float(np.interp(random.random(), _LEVELS, self.values))


_FIRST_TOKENS = Quantiles((890, 894, 897, 905, 1336, 5264, 13056, 25561, 38538, 89869, 126_000))
_ADDED_TOKENS = Quantiles((1, 5, 20, 63, 260, 471, 831, 4605, 7390, 17031, 60_000))
_BRANCH_TOKENS = Quantiles((10, 316, 894, 1707, 5790, 9567, 14851, 19913, 26597, 43120, 80_000))
_BRANCH_SHARE = Quantiles((0.015, 0.031, 0.054, 0.069, 0.115, 0.222, 0.469, 0.9, 0.944, 0.978, 1.0))
_OUTPUT_TOKENS = Quantiles((1, 3, 10, 24, 156, 350, 472, 597, 698, 1120, 2000))
_PAUSE_S = Quantiles((3, 12, 30, 42, 66, 123, 264, 480, 615, 1482, 3000))


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The last prompt of a conversation: its tokens, the ids of its whole blocks, and how often it came."""

    tokens: int
    whole: tuple[int, ...]
    turns: int


def generate(count: int, seed: int = 0) -> list[Request]:
    """Return `count` requests; the same for the same seed, and a shorter run is the beginning of a longer.

    Raises
    ------
    InvalidArgumentError
        For a count below 1.
    """
    positive("requests", count)
    random = np.random.default_rng(seed)
    due: list[tuple[int, int, _Prompt]] = []  # when it comes back, order, the prompt before
    requests: list[Request] = []
    fresh = 1  # block 0 is the one that all begin with
    now_ms = 0
    while True:
        for _ in range(random.poisson(_REQUESTS_A_TICK)):
            if len(requests) == count:
                return requests
            before = heapq.heappop(due)[2] if due and due[0][0] <= now_ms else None
            tokens, shared = _next_prompt(before, random)
            blocks = (*shared, *range(fresh, fresh - len(shared) - (-tokens // BLOCK_TOKENS)))
            fresh += len(blocks) - len(shared)
            turns = 1 if before is None else before.turns + 1
            requests.append(Request(now_ms, tokens, round(_OUTPUT_TOKENS.draw(random)), blocks))
            pause_ms = round(_PAUSE_S.draw(random) * 1e3)
            if random.random() < _RETURNS[min(turns, len(_RETURNS)) - 1]:
                prompt = _Prompt(tokens, blocks[: tokens // BLOCK_TOKENS], turns)
                heapq.heappush(due, (now_ms + pause_ms, len(requests), prompt))
        now_ms += _TICK_MS


def _next_prompt(before: _Prompt | None, random: Generator) -> tuple[int, tuple[int, ...]]:
    """Return the tokens of the next prompt, and the blocks that it has in common with the one before."""
    if before is None:
        return round(_FIRST_TOKENS.draw(random)), (0,)
    if random.random() < _BRANCHES:
        shared = before.whole[: max(1, round(len(before.whole) * _BRANCH_SHARE.draw(random)))]
        added = _BRANCH_TOKENS.draw(random)
        return min(_MOST_TOKENS, len(shared) * BLOCK_TOKENS + round(added)), shared
    tokens = min(_MOST_TOKENS, before.tokens + round(_ADDED_TOKENS.draw(random)))
    return tokens, before.whole[: tokens // BLOCK_TOKENS]
