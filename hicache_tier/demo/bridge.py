"""Between a transformers cache and the pools of this package.

A plain `DynamicCache` holds, per layer, K and V of shape `[1, heads, tokens, dim]`. A device pool holds them
as an engine does: `[tokens, heads, dim]` in pages at places of the engine's choice.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import TYPE_CHECKING

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import KVGeometry

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

    from hicache_tier.device_pool import DevicePool


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache for `model`.

    Raises
    ------
    InvalidArgumentError
        Where a layer does not keep K and V of every token (sliding windows, linear attention, and the like).
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=model.config)
    other = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
    if other:
        raise InvalidArgumentError(
            f"{model.config.model_type} models keep a cache of {', '.join(other)}; the demo supports models "
            "whose layers all keep K and V of every token (plain full attention), such as Llama or Qwen."
        )
    return cache


def cache_argument(model: PreTrainedModel) -> str:
    """Return what `model.forward` calls its cache: `cache`, before transformers 5.24 `past_key_values`."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def geometry_of(cache: DynamicCache, page_tokens: int) -> KVGeometry:
    """Read the geometry of pages from a cache that holds at least one token.

    Raises
    ------
    InvalidArgumentError
        Where layers are empty, differ in shape, or hold more than one sequence.
    """
    shapes = {(_outer(layer.keys), _outer(layer.values)) for layer in cache.layers}
    if len(shapes) != 1:
        raise InvalidArgumentError(f"the layers of this model's cache differ in shape: {sorted(shapes)}.")
    (batch, heads, k_dim, dtype), (_, v_heads, v_dim, v_dtype) = shapes.pop()
    if batch != 1 or heads != v_heads or dtype != v_dtype:
        raise InvalidArgumentError(
            f"K ({heads} heads, {dtype}) and V ({v_heads} heads, {v_dtype}) of {batch} sequences do not make "
            "pages; one sequence with equal heads and dtypes is needed."
        )
    return KVGeometry.mha(
        num_layers=len(cache.layers),
        num_kv_heads=heads,
        head_dim=k_dim,
        v_head_dim=v_dim,
        dtype=dtype,
        page_tokens=page_tokens,
    )


def _outer(tensor: torch.Tensor | None) -> tuple[int, int, int, str]:
    if tensor is None or tensor.dim() != 4:
        shape = None if tensor is None else tuple(tensor.shape)
        raise InvalidArgumentError(f"expected K and V as [batch, heads, tokens, dim], got {shape}.")
    batch, heads, _, dim = tensor.shape
    return batch, heads, dim, str(tensor.dtype)


def fill_pool(cache: DynamicCache, pool: DevicePool, pages: torch.Tensor) -> None:
    """Copy the first `len(pages)` pages of the cache's tokens to these pages of the pool."""
    for layer, (keys, values) in zip(cache.layers, pool.layers, strict=True):
        for source, target in ((layer.keys, keys), (layer.values, values)):
            paged = _paged(target, pool)
            count = len(pages) * paged.shape[1]
            tokens = source[0, :, :count].transpose(0, 1)  # [tokens, heads, dim]
            paged[pages.to(target.device)] = tokens.reshape(len(pages), *paged.shape[1:])


def fill_cache(pool: DevicePool, pages: torch.Tensor, cache: DynamicCache) -> None:
    """Append the tokens of these pages of the pool, in order, to an empty cache."""
    for index, (keys, values) in enumerate(pool.layers):
        k, v = (_tokens(_paged(tensor, pool), pages) for tensor in (keys, values))
        cache.update(k, v, index)


def fingerprint(cache: DynamicCache, tokens: int) -> str:
    """Return a digest of the bytes of K and V of the first `tokens` tokens, layer by layer, in their order.

    Attention hardly minds the order of what it looks back at, so equal logits alone would not tell that two
    pages had changed places; this does.
    """
    import torch

    digest = hashlib.sha256()
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            digest.update(tensor[:, :, :tokens].contiguous().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


def _tokens(paged: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return these pages as a cache wants them: `[1, heads, tokens, dim]`."""
    return paged[pages.to(paged.device)].flatten(0, 1).transpose(0, 1)[None].contiguous()


def _paged(tensor: torch.Tensor, pool: DevicePool) -> torch.Tensor:
    return tensor.view(-1, pool.geometry.page_tokens, *tensor.shape[1:])
