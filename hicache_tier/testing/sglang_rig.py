"""A server's caches on the CPU, made of SGLang's own parts: device pool, tree, controller, host pool."""

from __future__ import annotations

import json
import time
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .sglang_cpu import ServerContext

PAGE_TOKENS = 16
MODULE = "hicache_tier.integrations.sglang"


def extra_config(root: object, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the extra config that an operator would write, with options of the adapter."""
    return {
        "backend_name": "hicache_tier",
        "module_path": MODULE,
        "class_name": "HiCacheTierStorage",
        "interface_v1": 1,
        "root": str(root),
        "capacity_bytes": "64 MiB",
        "prefetch_threshold": PAGE_TOKENS,
        **options,
    }


class Caches:
    """One process's caches for a small model; every token's KV follows from the prompt, so mix-ups are seen.

    Parameters
    ----------
    context : ServerContext
    layout : str
        As the context's `hicache_mem_layout`.
    kind : str
        `mha`, `wide_k` (K wider than V) or `mla`.
    pages : int
        Of the device pool; the host pool has twice as many.
    """

    def __init__(self, context: ServerContext, layout: str, kind: str = "mha", pages: int = 64) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.layout, self.rank = layout, context.rank
        self.pool = device_pool(kind, pages)
        size = pages * PAGE_TOKENS
        self.allocator = PagedTokenToKVPoolAllocator(
            size, PAGE_TOKENS, self.pool.dtype, "cpu", self.pool, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(8, size, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_TOKENS,
            tp_cache_group=context.group,
            tree_components=(ComponentType.FULL,),
        )
        self.cache = UnifiedRadixCache(params)
        self._begin(params)
        self._requests = 0

    def _begin(self, params: Any) -> None:  # noqa: ANN401 - CacheInitParams
        """Give the tree what it has below the device."""
        from sglang.srt.runtime_context import get_server_args

        self.cache.init_hicache(get_server_args(), params)
        for entry in self.cache.host_pool_group.entries:
            entry.host_pool.pin_memory = False  # its flat pages would be pinned, and here is nothing to do it

    @property
    def storage(self) -> Any:  # noqa: ANN401 - the adapter, or what wraps it
        """The storage backend."""
        return self.cache.cache_controller.storage_backend

    def attach(self, config: dict[str, Any], policy: str = "wait_complete") -> tuple[bool, str]:
        """Attach the backend as an operator does, at run time."""
        answer: tuple[bool, str] = self.cache.attach_storage_backend(
            "dynamic",
            json.dumps(config),
            served_model_name="org/model",
            hicache_storage_prefetch_policy=policy,
        )
        return answer

    def detach(self) -> tuple[bool, str]:
        """Detach it."""
        answer: tuple[bool, str] = self.cache.detach_storage_backend()
        return answer

    def close(self) -> None:
        """Detach what is attached."""
        if self.storage is not None:
            self.detach()

    # -- what a scheduler does -----------------------------------------------------------------------------

    def pump(self, done: Callable[[], bool], timeout_s: float = 20.0) -> bool:
        """Take scheduler steps until something is so; say whether it is."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            self.cache.check_hicache_events()
            if done():
                return True
            time.sleep(0.002)
        return False

    def compute(self, tokens: Sequence[int]) -> None:
        """Compute a prompt's KV, insert it in the tree, and let it be written through."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        slots = self.allocator.alloc(len(tokens))
        assert slots is not None, "the device pool is full"
        for buffer, rows in self._buffers_and(tokens):
            buffer[slots] = rows
        self.cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots.clone()))
        assert self.pump(self.settled), "stuck"

    def settled(self) -> bool:
        """Whether all that is computed is stored, or was refused."""
        return not self.cache.ongoing_write_through and not self.cache.ongoing_backup

    def forget(self) -> None:
        """Lose everything but what is stored, as a restart does."""
        self.cache.reset()
        self.allocator.clear()
        for buffer in self._buffers():
            buffer.zero_()

    def prefetch(self, tokens: Sequence[int]) -> int:
        """Prefetch a prompt from storage; return how many of its tokens are in the host pool then."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        match = self._match(tokens)
        have = match.device_prefix_len + match.host_hit_length
        self._requests += 1
        handle = CacheRequestHandle(f"request-{self._requests}", 0)
        last = self.cache.get_last_hash_value(match.last_host_node)
        self.cache.prefetch_from_storage(handle, match.last_host_node, array("q", tokens[have:]), last)
        assert self.pump(lambda: bool(self.cache.check_prefetch_progress(handle))), "stuck"
        match = self._match(tokens)
        return int(match.device_prefix_len + match.host_hit_length)

    def load_back(self, tokens: Sequence[int]) -> int:
        """Bring a prompt's pages from the host pool to the device; return how many tokens are there then."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        match = self._match(tokens)
        request = SimpleNamespace(
            rid="load-back",
            last_node=match.last_device_node,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
            prefix_indices=torch.empty(0, dtype=torch.int64),
            kv=SimpleNamespace(mamba_pool_idx=None),
        )
        self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request
            )
        )
        self.cache.ready_to_load_host_cache()
        assert self.pump(lambda: not self.cache.ongoing_load_back), "stuck"
        return int(self._match(tokens).device_prefix_len)

    def right(self, tokens: Sequence[int]) -> bool:
        """Whether the device holds the right bytes for all of the prompt that the tree says it holds."""
        match = self._match(tokens)
        slots = self.cache.path_device_indices(match.last_device_node)
        return all(
            torch.equal(buffer[slots], rows[: len(slots)]) for buffer, rows in self._buffers_and(tokens)
        )

    # -- inside --------------------------------------------------------------------------------------------

    def _match(self, tokens: Sequence[int]) -> Any:  # noqa: ANN401 - MatchResult
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def _buffers(self) -> list[torch.Tensor]:
        if hasattr(self.pool, "k_buffer"):
            return [*self.pool.k_buffer, *self.pool.v_buffer]
        return list(self.pool.kv_buffer)

    def _buffers_and(self, tokens: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each device buffer with the rows that a prompt's tokens have in it."""
        return [
            (buffer, kv_rows(tokens, number, buffer.shape[1:], buffer.dtype, self._part))
            for number, buffer in enumerate(self._buffers())
        ]

    @property
    def _part(self) -> int:
        """What tells the bytes of ranks apart: nothing where KV is replicated."""
        return self.rank if hasattr(self.pool, "k_buffer") else 0


def device_pool(kind: str, pages: int) -> Any:  # noqa: ANN401 - one of SGLang's device pools
    """Return a small device pool of SGLang's."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    common = {
        "size": pages * PAGE_TOKENS,
        "page_size": PAGE_TOKENS,
        "layer_num": 3,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "mla":
        return MLATokenToKVPool(dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=16, **common)
    wide = {"v_head_dim": 24} if kind == "wide_k" else {}
    return MHATokenToKVPool(dtype=torch.bfloat16, head_num=2, head_dim=32, **wide, **common)


def kv_rows(
    tokens: Sequence[int], buffer: int, shape: Sequence[int], dtype: torch.dtype, part: int
) -> torch.Tensor:
    """Return the KV of tokens in one buffer: it follows from all tokens before, as real KV does."""
    prefix = torch.tensor(tokens, dtype=torch.int64).cumsum(0) * 1_000_003 + torch.arange(len(tokens))
    width = int(torch.tensor(tuple(shape)).prod())
    mixed = prefix[:, None] * 31 + torch.arange(width) * 7 + buffer * 101 + part * 1009
    return (mixed % 251 - 125).to(dtype).reshape(len(tokens), *shape)


def prompt(seed: int, pages: int) -> list[int]:
    """Return the tokens of a prompt of so many pages."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 50_000, (pages * PAGE_TOKENS,), generator=generator).tolist()
