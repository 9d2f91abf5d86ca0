"""Which device pools a server has, and what their pages are in this project's terms.

Plain MHA and MLA pools, those of models with sliding windows, and DSA's with its indexer are recognised:
their pages are stored as the storage plug-in stores them out of host pools. Those of other models are
described by SGLang itself, as far as it lets linkers have them; their pages are blocks of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch

from hicache_tier.device_paths import check_device_route
from hicache_tier.device_pool import DevicePool
from hicache_tier.dtypes import DType
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import Component, KVGeometry, PoolKind
from hicache_tier.layout import Layout

from .facts import plain
from .kinds import geometry_of, pool_facts
from .linker_view import DeviceView

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

KV: Final = "kv"
_SWA: Final = "swa"
_INDEXER: Final = "indexer"
_PLAIN: Final = frozenset({"MHATokenToKVPool", "MLATokenToKVPool"})
_RECOGNISED: Final = _PLAIN | {"SWAKVPool", "DSATokenToKVPool"}
_SCALES: Final = ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer", "native_v_scale_buffer")
# What a host pool says of itself that its device pool says too, under the same name.
_SAME: Final = (
    "dsa_kv_cache_store_fp8",
    "head_dim",
    "head_num",
    "kv_cache_dim",
    "qk_rope_head_dim",
    "start_layer",
    "v_head_dim",
)


@dataclass(frozen=True, slots=True)
class DevicePools:
    """The pools of one server.

    Attributes
    ----------
    views : list of DeviceView
    num_layers : int
        Layers that a forward pass waits for.
    replicated : bool
        Whether every rank of tensor parallelism holds the same bytes.
    """

    views: list[DeviceView]
    num_layers: int
    replicated: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """How pages are to be seen.

    Attributes
    ----------
    page_tokens : int
        Slots a page.
    layout : Layout
        Order of axes in the store, for pools that are recognised.
    kv_dtype : str or None
        The server's `--kv-cache-dtype`: pools hold fp8 as uint8.
    drafts : tuple
        Pools of a draft model's layers that are stored in the target's pages, which only DSA's can be.
    apart : tuple
        Pools of a draft model that would have pages of their own.
    """

    page_tokens: int
    layout: Layout
    kv_dtype: str | None
    drafts: tuple[Any, ...] = ()
    apart: tuple[Any, ...] = ()


def device_pools(
    kvcache: Any,  # noqa: ANN401 - SGLang's
    components: Collection[str],
    wanted: Wanted,
    described: Callable[[], Any],
) -> DevicePools:
    """Find the pools behind a server's KV cache.

    Parameters
    ----------
    kvcache
        What the server's allocator gives slots of.
    components : collection of str
        Parts of the radix tree: `full`, `swa`, `mamba`.
    wanted : Wanted
    described
        Returns SGLang's own description of the pools, a `DevicePoolGroup`.

    Raises
    ------
    InvalidArgumentError
        For pools whose pages cannot be stored; the message says why.
    UnsupportedTransferError
        For a layout that the device route does not have.
    """
    kind, parts = type(kvcache).__name__, set(components)
    if (kind in {*_PLAIN, "SWAKVPool"} and wanted.drafts) or (kind in _RECOGNISED and wanted.apart):
        raise InvalidArgumentError(f"{kind}: the draft model's KV cannot be stored without HiCache.")
    if kind in _PLAIN and parts == {"full"}:
        found = [_whole(kvcache, KV, wanted)]
    elif kind == "SWAKVPool" and parts == {"full", "swa"}:
        found = [_whole(kvcache.full_kv_pool, KV, wanted), _whole(kvcache.swa_kv_pool, _SWA, wanted)]
    elif kind == "DSATokenToKVPool" and parts == {"full"}:
        found = [_latents(kvcache, wanted), _index_keys(kvcache, wanted)]
    else:
        group = described()
        views = [_blocks(entry) for entry in group.entries]
        return DevicePools(views, int(group.num_layers), bool(group.rank_replicated))
    return DevicePools(found, int(kvcache.layer_num), replicated=not found[0].sharded)


def _whole(pool: Any, name: str, wanted: Wanted) -> DeviceView:  # noqa: ANN401 - one of SGLang's device pools
    """Return the view of an MHA or MLA pool by itself."""
    said = f"pool {name} ({type(pool).__name__})"
    if type(pool).__name__ not in _PLAIN:
        raise InvalidArgumentError(f"{said} cannot be stored without HiCache.")
    axes = getattr(pool, "kv_cache_layout", "nhd")
    if axes != "nhd":
        raise InvalidArgumentError(
            f"{said} orders its axes as {axes}; without HiCache only nhd can be stored."
        )
    if any(getattr(pool, scales, None) is not None for scales in _SCALES):
        raise InvalidArgumentError(
            f"{said} keeps scales beside its KV; that cannot be stored without HiCache."
        )
    like = _as_host(pool, pool.layer_num, wanted)
    tensors = (
        list(zip(pool.k_buffer, pool.v_buffer, strict=True))
        if hasattr(pool, "k_buffer")
        else list(pool.kv_buffer)
    )
    return _recognised(like, name, tensors, wanted)


def _latents(pool: Any, wanted: Wanted) -> DeviceView:  # noqa: ANN401 - one of SGLang's device pools
    """Return the view of DSA's latents; a draft model's layers come last."""
    tensors = [buffer for part in (pool, *wanted.drafts) for buffer in part.kv_buffer]
    return _recognised(_as_host(pool, len(tensors), wanted), KV, tensors, wanted)


def _index_keys(pool: Any, wanted: Wanted) -> DeviceView:  # noqa: ANN401 - one of SGLang's device pools
    """Return the view of DSA's index keys, which layers may have in common: such a layer has none itself."""
    held = [[one for one in part.index_k_with_scale_buffer if len(one)] for part in (pool, *wanted.drafts)]
    tensors = [buffer for part in held for buffer in part]
    if not tensors:
        raise InvalidArgumentError("the pool of index keys holds none.")
    like = _as_host(pool, len(tensors), wanted)
    for attribute in ("kv_cache_dim", "qk_rope_head_dim", "dsa_kv_cache_store_fp8"):
        delattr(like, attribute)
    like.indexer_page_stride_size, like.indexer_dtype = tensors[0].shape[1], tensors[0].dtype
    like.target_layer_num = len(held[0])
    return _recognised(like, _INDEXER, tensors, wanted, source=KV)


def _as_host(pool: Any, layers: int, wanted: Wanted) -> SimpleNamespace:  # noqa: ANN401
    """Return what the host pool of a device pool would say of itself."""
    like = SimpleNamespace(**{name: getattr(pool, name) for name in _SAME if hasattr(pool, name)})
    like.layer_num, like.target_layer_num = layers, int(pool.layer_num)
    like.dtype, like.page_size = pool.store_dtype, wanted.page_tokens
    return like


def _recognised(
    like: SimpleNamespace, name: str, tensors: Sequence[Any], wanted: Wanted, source: str = ""
) -> DeviceView:
    geometry = geometry_of(like, wanted.kv_dtype)
    if geometry is None:
        raise InvalidArgumentError(f"pool {name}: what its pages hold is not known: {vars(like)}.")
    layout = wanted.layout
    check_device_route(geometry.kind, layout, sharded=False)
    facts = pool_facts(like, recognised=True)
    sharded = geometry.kind is PoolKind.MHA
    return DeviceView(like, name, source or name, DevicePool(geometry, tensors), layout, facts, sharded)


def _blocks(entry: Any) -> DeviceView:  # noqa: ANN401 - SGLang's DevicePoolEntry
    """Return the view of a pool whose pages are blocks of bytes, one for each component and layer."""
    name = _name(entry.name)
    counts = {len(component) for component in entry.components}
    if len(counts) != 1:
        raise InvalidArgumentError(f"pool {name}: its components have {sorted(counts)} buffers.")
    planes = [[_rows(name, buffer) for buffer in component] for component in entry.components]
    sizes = [{size for _, _, size in component} for component in entry.buffer_meta]
    if any(len(found) != 1 for found in sizes):
        raise InvalidArgumentError(f"pool {name}: pages of its layers differ in size: {sizes}.")
    parts = tuple(Component(f"block{at}", 1, found.pop()) for at, found in enumerate(sizes))
    geometry = KVGeometry(PoolKind.INDEXER, counts.pop(), parts, DType.UINT8, int(entry.page_size), 1)
    layers = [tuple(tensors) if len(parts) > 1 else tensors[0] for tensors in zip(*planes, strict=True)]
    owner = entry.device_pool
    first = owner[0] if isinstance(owner, list | tuple) else owner
    facts = {
        "class": type(first).__name__,
        "blocks": [[plain(part[0].dtype), list(part[0].shape[1:])] for part in entry.components],
        "layers_from": plain(getattr(first, "start_layer", None)),
    }
    facts = {fact: value for fact, value in facts.items() if value}
    like = SimpleNamespace(dtype=torch.uint8)
    return DeviceView(
        like,
        name,
        _name(entry.indices_from_pool),
        DevicePool(geometry, layers),
        Layout.PAGE_FIRST,
        facts,
        sharded=True,
        translate=entry.translate_indices,
    )


def _rows(name: str, buffer: torch.Tensor) -> torch.Tensor:
    """Return a buffer's rows as bytes, `[rows, bytes]`, where they lie."""
    if buffer.shape[0] and not buffer[0].is_contiguous():
        raise InvalidArgumentError(
            f"pool {name}: rows of a buffer {tuple(buffer.shape)} are not in one piece."
        )
    width = buffer[0].numel() * buffer.element_size()
    flat = buffer.as_strided((buffer.shape[0], buffer[0].numel()), (buffer.stride(0), 1))
    return flat.view(torch.uint8).view(buffer.shape[0], width) if width else flat.view(torch.uint8)


def _name(name: Any) -> str:  # noqa: ANN401 - PoolName, or text
    return str(getattr(name, "value", name))
