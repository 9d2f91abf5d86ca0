"""The stand-in where no real model is at hand: a Llama with random weights and one token a byte.

What it writes means nothing. What it computes is real: attention over a KV cache of thirty layers, in which a
wrong byte changes what comes out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_tier.errors import InvalidArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 20240607
NUM_LAYERS = 30
VOCABULARY = 256


class ByteTokenizer:
    """Tokens are the bytes of the text in UTF-8; at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def encode(self, text: str) -> list[int]:
        """Return the first `limit` bytes of `text`."""
        return list(text.encode()[: self.limit])

    def decode(self, tokens: list[int]) -> str:
        """Return text; bytes that are not UTF-8 become the replacement character."""
        return bytes(tokens).decode(errors="replace")


def random_llama(num_layers: int = NUM_LAYERS) -> PreTrainedModel:
    """Build a grouped-query Llama of `num_layers` layers whose weights follow from a fixed seed.

    The weights are drawn wide (standard deviation 0.06), so that the next token depends on the text and does
    not settle at once on one that repeats.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if num_layers < 1:
        raise InvalidArgumentError(f"random:LAYERS needs at least 1 layer, got {num_layers}.")
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    }
    config = LlamaConfig(num_hidden_layers=num_layers, initializer_range=0.06, **shape)
    state = torch.random.get_rng_state()
    torch.manual_seed(SEED)
    try:
        return LlamaForCausalLM(config)
    finally:
        torch.random.set_rng_state(state)
