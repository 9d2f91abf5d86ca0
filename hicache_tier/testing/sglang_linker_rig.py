"""A server's caches on the CPU with a linker: device pool, SGLang's own tree, and no host pool."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from .sglang_rig import MODULE, PAGE_TOKENS, Caches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .sglang_cpu import ServerContext


def linker_config(root: object, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the config that an operator would write, with options of the linker."""
    extra = {"root": str(root), "capacity_bytes": "64 MiB", **options}
    return {"linker": "HiCacheTierLinker", "linker_module_path": MODULE, "linker_extra_config": extra}


class LinkedCaches(Caches):
    """One process's caches for a small model, linked to storage.

    Parameters
    ----------
    context : ServerContext
    config : dict
        As `--unified-cache-external-linker-config`.
    kind : str
        As of `Caches`.
    pages : int
        Of the device pool.
    """

    def __init__(
        self, context: ServerContext, config: dict[str, Any], kind: str = "mha", pages: int = 64
    ) -> None:
        self.config = config
        super().__init__(context, "", kind, pages)

    def _begin(self, params: Any) -> None:  # noqa: ANN401 - CacheInitParams
        self._params = params
        self.link()

    def link(self) -> None:
        """Make a linker, as SGLang's factory does at start, and attach it."""
        from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
        from sglang.srt.runtime_context import get_server_args

        self.cache.init_cache_linker(
            create_unified_cache_linker(
                get_server_args(),
                self._params,
                backend="dynamic",
                config=self.config,
                components=set(self.cache.components),
            )
        )
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)

    def close(self) -> None:
        """Close the linker, as a server does at its end."""
        self.cache.release_host_resources()

    @property
    def linker(self) -> Any:  # noqa: ANN401 - the adapter
        """The linker."""
        return self.cache.linker.cache_linker

    def settled(self) -> bool:
        """Whether all that is computed is stored, or was refused."""
        return not self.cache.linker.pending_offloads

    def ready_is_idle(self) -> bool:
        """Whether the next batch has no load to wait for."""
        return int(self.cache.ready_to_load_host_cache()) == -1

    def found(self, tokens: Sequence[int], rid: str = "look") -> int:
        """Return how many tokens of a prompt are found in storage beyond those on the device."""
        return int(self.match(tokens, rid)[1].host_hit_length)

    def match(self, tokens: Sequence[int], rid: str) -> tuple[Any, Any]:
        """Match a request, as the scheduler does; return request and match."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        request = SimpleNamespace(rid=rid, kv=None, session=None, swa_branching_seqlen=None)
        request.swa_host_hit_length = request.mamba_host_hit_length = 0
        key = RadixKey(array("q", tokens))
        match = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        request.last_node = match.last_device_node
        return request, match

    def load(self, tokens: Sequence[int], rid: str = "load", *, keep: bool = True) -> int:
        """Load what storage has of a prompt; return how many of its tokens have the right bytes then.

        Parameters
        ----------
        tokens : sequence of int
        rid : str
        keep : bool
            Whether to insert what was loaded in the tree, as after a forward pass, or to give it up.
        """
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        request, match = self.match(tokens, rid)
        count, _ = self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request
            )
        )
        if not count:
            return 0
        slots = self.cache.linker.private_load_indices[rid]
        have = match.device_prefix_len
        index = self.cache.ready_to_load_host_cache()
        self.linker.layer_done_counter.set_consumer(index)
        for layer in range(self.pool.layer_num):
            self.linker.layer_done_counter.wait_until(layer)
        right = all(
            torch.equal(buffer[slots], rows[have : have + count])
            for buffer, rows in self._buffers_and(tokens)
        )
        assert self.cache.finish_external_linker_loads([request]) == []
        if not keep:
            self.allocator.free(slots)
            return count if right else -1
        on_device = self.cache.path_device_indices(match.last_device_node)
        value = torch.cat([on_device, slots])
        key = RadixKey(array("q", tokens[: len(value)]))
        self.cache.insert(InsertParams(key=key, value=value, prev_prefix_len=have))
        assert self.pump(self.settled), "stuck"
        return count if right else -1


__all__ = ["PAGE_TOKENS", "LinkedCaches", "linker_config"]
