"""Reading a prompt and writing on from it, greedily, with the time to the first token."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .bridge import cache_argument, new_cache

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Generation:
    """What a run wrote.

    Attributes
    ----------
    tokens : list[int]
        The argmax of the logits at every step.
    logits : torch.Tensor
        `[steps, vocabulary]`, float32, on the host.
    cached_tokens : int
        Tokens of the prompt that were in the cache already when the model began to read.
    first_token_seconds : float
        From `started` until the first token was known.
    decode_seconds : float
        From then until the last token was known.
    """

    tokens: list[int]
    logits: torch.Tensor
    cached_tokens: int
    first_token_seconds: float
    decode_seconds: float


def generate(
    model: PreTrainedModel, prompt: list[int], cache: DynamicCache, steps: int, *, started: float
) -> Generation:
    """Read what `cache` does not hold yet of `prompt`, then write `steps` tokens.

    Parameters
    ----------
    started : float
        `time.perf_counter()` of when the request came in, before anything was done for it.
    """
    import torch

    cached = int(cache.get_seq_length())
    rows = []
    tokens: list[int] = []
    unread = prompt[cached:]
    first = 0.0
    for step in range(steps):
        row = _forward(model, unread, cache)
        tokens.append(int(row.argmax()))  # waits for the device
        unread = tokens[-1:]
        rows.append(row)
        if step == 0:
            first = time.perf_counter()
    logits = torch.stack(rows).float().cpu()
    return Generation(tokens, logits, cached, first - started, time.perf_counter() - first)


def warm_up(model: PreTrainedModel) -> DynamicCache:
    """Run a few tokens, so that neither timed run pays for first calls; return the cache they filled."""
    cache = new_cache(model)
    _forward(model, list(range(_WARM_UP_TOKENS)), cache)
    _forward(model, [0], cache)
    return cache


def _forward(model: PreTrainedModel, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
    """Return the logits after the last of `tokens`, on the model's device."""
    import torch

    extra = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    ids = torch.tensor([tokens], device=model.device)
    with torch.inference_mode():
        out = model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **extra)
    row: torch.Tensor = out.logits[0, -1]
    return row
