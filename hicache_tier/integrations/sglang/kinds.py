"""What a page of one of SGLang's host pools holds, in this project's terms.

A pool is recognised only where its own description and the pieces that it names agree to the byte; any other
is taken as opaque blocks. Either way all that SGLang says of the pool becomes part of the identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hicache_tier.dtypes import DType
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import Component, KVGeometry, PoolKind
from hicache_tier.layout import Layout

from .facts import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

# Attributes of host pools that decide what a page's bytes mean, beside its geometry and layout.
_FACTS: Final = ("dsa_kv_cache_store_fp8", "qk_rope_head_dim", "storage_format_tag")
# Those of pools that are not recognised, whose geometry says nothing.
_OPAQUE_FACTS: Final = (
    "conv_dtype",
    "conv_state_shapes",
    "dtype",
    "head_dim",
    "head_num",
    "indexer_dtype",
    "item_bytes",
    "layer_num",
    "layout",
    "num_mamba_layers",
    "ring_size",
    "row_bytes",
    "state_page_bytes",
    "storage_objects_per_page",
    "temporal_dtype",
    "temporal_state_shape",
)
_LOGICAL: Final = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True, slots=True)
class Kind:
    """What was recognised.

    Attributes
    ----------
    geometry : KVGeometry
    layout : Layout
    order : tuple of int
        Where each segment of a stored page is among the pieces as SGLang lists them.
    sharded : bool
        Whether each tensor-parallel rank holds bytes of its own, as far as the geometry tells.
    recognised : bool
        Whether the geometry says what the bytes are; else they are blocks.
    """

    geometry: KVGeometry
    layout: Layout
    order: tuple[int, ...]
    sharded: bool
    recognised: bool


def recognise(pool: Any, sizes: Sequence[int], num_pages: int, kv_dtype: str | None) -> Kind:  # noqa: ANN401
    """Return what a page of `pool` is.

    Parameters
    ----------
    pool
        One of SGLang's host pools.
    sizes : sequence of int
        Bytes of a page's pieces, in the order in which SGLang lists them.
    num_pages : int
    kv_dtype : str, optional
        The server's `--kv-cache-dtype`: pools hold fp8 as uint8.
    """
    layout = _layout(pool)
    geometry = geometry_of(pool, kv_dtype)
    if geometry is not None and layout is not None and not layout.why_not(geometry.kind):
        order = _order(geometry, layout, sizes, num_pages)
        if order is not None:
            sharded = geometry.kind is PoolKind.MHA
            return Kind(geometry, layout, order, sharded=sharded, recognised=True)
    return blocks(sum(sizes), int(pool.page_size), len(sizes))


def geometry_of(pool: Any, kv_dtype: str | None) -> KVGeometry | None:  # noqa: ANN401
    """Return what a page holds by a pool's own description, or None where that is not known here."""
    return _mha(pool, kv_dtype) or _mla(pool, kv_dtype) or _indexer(pool)


def blocks(page_nbytes: int, page_tokens: int, pieces: int = 1) -> Kind:
    """Return the kind of pages that are blocks of bytes, in so many pieces."""
    block = Component("index", 1, page_nbytes)
    geometry = KVGeometry(PoolKind.INDEXER, 1, (block,), DType.UINT8, page_tokens, 1)
    order = tuple(range(pieces))
    return Kind(geometry, Layout.PAGE_FIRST, order, sharded=True, recognised=False)


def pool_facts(pool: Any, *, recognised: bool) -> dict[str, Any]:  # noqa: ANN401 - SGLang's host pool
    """Return what SGLang says of a pool's bytes, as plain data, beyond what a recognised geometry says."""
    facts = {name: plain(getattr(pool, name, None)) for name in _FACTS}
    if getattr(pool, "start_layer", None):  # a pipeline stage: stages of one size need not be the same layers
        facts["layers_from"] = plain(pool.start_layer)
    if packs_draft(pool):
        facts["target_layers"] = plain(pool.target_layer_num)
    if not recognised:
        facts |= {name: plain(getattr(pool, name, None)) for name in _OPAQUE_FACTS}
        facts["class"] = type(pool).__name__
    order = getattr(_first(getattr(pool, "_buffer_infos", ())), "buffers", None)
    axes = getattr(getattr(order, "layout", None), "value", None)
    if axes not in {None, "nhd", "paged_nhd"}:  # the device's order of axes within a page, kept on the host
        facts["axes"] = plain(axes)
    return {name: value for name, value in sorted(facts.items()) if value is not None and value is not False}


def packs_draft(pool: Any) -> bool:  # noqa: ANN401 - one of SGLang's host pools
    """Tell whether a pool holds layers of a draft model after those of the target."""
    target, layers = getattr(pool, "target_layer_num", None), getattr(pool, "layer_num", None)
    return isinstance(target, int) and isinstance(layers, int) and layers > target


def _first(items: Any) -> Any:  # noqa: ANN401
    return items[0] if items else None


def _layout(pool: Any) -> Layout | None:  # noqa: ANN401
    try:
        return Layout.parse(pool.layout)
    except InvalidArgumentError:
        return None


def _dtype(pool: Any, kv_dtype: str | None) -> object:  # noqa: ANN401
    name = str(getattr(pool, "dtype", None)).removeprefix("torch.")
    return _LOGICAL.get(kv_dtype or "", name) if name == "uint8" else name


def _mha(pool: Any, kv_dtype: str | None) -> KVGeometry | None:  # noqa: ANN401
    if not all(hasattr(pool, name) for name in ("head_num", "head_dim", "v_head_dim", "layer_num")):
        return None
    try:
        return KVGeometry.mha(
            num_layers=pool.layer_num,
            num_kv_heads=pool.head_num,
            head_dim=pool.head_dim,
            v_head_dim=pool.v_head_dim,
            dtype=_dtype(pool, kv_dtype),
            page_tokens=pool.page_size,
        )
    except InvalidArgumentError:
        return None


def _mla(pool: Any, kv_dtype: str | None) -> KVGeometry | None:  # noqa: ANN401
    if not all(hasattr(pool, name) for name in ("kv_cache_dim", "layer_num")):
        return None
    try:
        return KVGeometry.mla(
            num_layers=pool.layer_num,
            latent_dim=pool.kv_cache_dim,
            dtype=_dtype(pool, kv_dtype),
            page_tokens=pool.page_size,
        )
    except InvalidArgumentError:
        return None


def _indexer(pool: Any) -> KVGeometry | None:  # noqa: ANN401
    stride = getattr(pool, "indexer_page_stride_size", None)
    itemsize = getattr(getattr(pool, "indexer_dtype", None), "itemsize", 0)
    if not isinstance(stride, int) or not itemsize or stride * itemsize % pool.page_size:
        return None
    try:
        return KVGeometry.indexer(
            num_layers=pool.layer_num,
            bytes_per_token=stride * itemsize // pool.page_size,
            page_tokens=pool.page_size,
        )
    except InvalidArgumentError:
        return None


def _order(
    geometry: KVGeometry, layout: Layout, sizes: Sequence[int], num_pages: int
) -> tuple[int, ...] | None:
    """Return where each fragment is among the pieces, or None where they are not this geometry's.

    SGLang lists pieces layer by layer, K then V in each; a stored page has all of K, then all of V.
    """
    components = len(geometry.components)
    if len(sizes) % components:
        return None
    order: list[int] = np.arange(len(sizes)).reshape(-1, components).T.ravel().tolist()
    wanted = [fragment.nbytes for fragment in layout.fragments(geometry, num_pages)]
    if [sizes[at] for at in order] != wanted:
        return None
    return tuple(order)
