"""`HiCacheTierLinker`: SGLang's linker of device pools to storage, without a host tier in between."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel, get_serving

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.metrics import Exporter
from hicache_tier_storage.status import failed

from .desk import Desk
from .facts import kv_cache_dtype, server_arguments, weight_version
from .guard import guarded, nothing
from .hits import HitPolicy, SidePool, combine
from .linker_calls import DevicePages, DeviceStore, as_view
from .linker_offloads import Offload, Offloads
from .linker_options import LinkerOptions
from .linker_pools import KV, DevicePools, Wanted, device_pools
from .names import names_of
from .ranks import Ranks
from .tally import Tally

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_tier_storage import PageStatus

    from .linker_view import DeviceView

_LOG = logging.getLogger(__name__)
_FOLLOW_S: Final = 0.005  # lookups are made by SGLang's scheduler
_DRAIN_S: Final = 4.0  # SGLang waits for a reset in its scheduler
# Of what storage moves in a quarter of the deadline: in one load, and in one round of writes.
_LOAD: Final = 3
_ROUND: Final = 2
_GIVEN_UP: Final = failed("given_up")


class HiCacheTierLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Storage below SGLang's device pools.

    Loaded by `--unified-cache-external-linker-backend dynamic`; see the README. No method raises for a fault
    of the storage. A load is done when `load` returns: what did not come is computed, on all ranks, and no
    request fails for it. No page of the device is written after `load` has returned.

    Parameters
    ----------
    server_args : ServerArgs
    params : CacheInitParams
    components : set of ComponentType
    extra_config : dict, optional
        Options, see `LinkerOptions`.
    forward_stream : torch.cuda.Stream, optional

    Raises
    ------
    InvalidArgumentError
        For an option that is not known or not allowed, or pools that cannot be stored.
    UnsupportedTransferError
        For a layout that the device route does not have.
    """

    def __init__(
        self,
        server_args: Any,  # noqa: ANN401 - ServerArgs
        params: Any,  # noqa: ANN401 - CacheInitParams
        *,
        components: Any,  # noqa: ANN401 - set of ComponentType
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,  # noqa: ANN401
        **later: object,
    ) -> None:
        del server_args, later
        self.forward_stream = forward_stream
        self.options = LinkerOptions.parse(extra_config)
        arguments = server_arguments()
        wanted = Wanted(
            int(params.page_size),
            self.options.layout,
            kv_cache_dtype(arguments),
            tuple(params.mtp_draft_device_pools),
            tuple(params.sidecar_draft_device_pools),
        )
        found = _pools(params, components, wanted)
        common = self.options.common
        self.ranks = Ranks.of(_storage_config(params, found), common.model)
        self._groups = _groups(params)
        self._exporter: Exporter | None = None
        if common.metrics:
            port = common.metrics_port
            self._exporter = Exporter(
                None if port is None else port + self.ranks.number, common.metrics_address
            )
        self.tally = Tally(self.ranks.label, self._exporter.instruments if self._exporter else None)
        self.desk = Desk(common, self.tally, _FOLLOW_S, weight_version)
        self.stores: dict[str, DeviceStore] = {}
        try:
            for view in found.views:
                self._open(view, arguments)
        except BaseException:
            self.desk.close()
            if self._exporter is not None:
                self._exporter.close()
            raise
        self.pools = {PoolName(name): store.device_view for name, store in self.stores.items()}
        self.layer_done_counter = LayerWiseLoadCounter(found.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._loaded: set[str] = set()
        self._offloads = Offloads(self._store)
        self._closed = False

    def _open(self, view: DeviceView, arguments: dict[str, Any]) -> None:
        common, ranks = self.options.common, self.ranks
        store = self.desk.open(lambda: DeviceStore(as_view(view), common, ranks, arguments))
        self.desk.pools[view.name] = store
        self.stores[view.name] = cast("DeviceStore", store)
        _LOG.info("pool %s: %r", view.name, store.store)

    # -- looking up ------------------------------------------------------------------------------------------

    @guarded("exists", lambda *_, **__: [])
    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Return every length of prefix, in pages, that all pools can restore in time; from memory."""
        del rid
        by_source = {_text(one.name): one for one in transfers}
        anchor = by_source.get(KV)
        if anchor is None or not anchor.keys or not self._complete(by_source):
            return []
        names = names_of(anchor.keys)
        if not self.desk.may_look():
            self.tally.lookup(len(names), 0)
            return []
        sides = [
            self._side(store, by_source[store.device_view.source], names)
            for name, store in self.stores.items()
            if name != KV
        ]
        there = self.stores[KV].match(names) if KV in self.stores else len(names)
        hit = combine(KV, there, len(names), sides)
        found = [length for length in hit.restorable if length <= self._most_pages]
        self.tally.lookup(len(names), max(found, default=0))
        return found

    @property
    def _most_pages(self) -> int:
        """Pages that storage loads within the deadline: a longer load would be left, and all of it lost."""
        along = [store for store in self.stores.values() if store.device_view.source == KV]
        return _LOAD * min(store.paces["get"].pages for store in along)

    def _complete(self, by_source: dict[str, Any]) -> bool:
        """Tell whether what is asked for has the keys of every pool."""
        return all(
            (one := by_source.get(store.device_view.source)) is not None and one.keys
            for store in self.stores.values()
        )

    @staticmethod
    def _side(store: DeviceStore, transfer: Any, names: list[bytes]) -> SidePool:  # noqa: ANN401 - PoolTransfer
        """Return what a pool beside the anchor asks for, and has."""
        name = store.device_view.name
        policy = (
            HitPolicy.ALL_PAGES if store.device_view.source == KV else HitPolicy.parse(transfer.hit_policy)
        )
        return SidePool(name, policy, store.contains(names), max(1, len(transfer.keys)))

    # -- loading ---------------------------------------------------------------------------------------------

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Load pages into slots of a request; True where all of them came, on every rank.

        SGLang would fail the request for a load that breaks off after this has returned; one that is refused
        here is computed instead. So it is done here, and the ranks agree on how it went.
        """
        loaded = self._agree(self._load(transfers))
        if loaded:
            self._loaded.add(rid)
        return loaded

    def _load(self, transfers: Sequence[Any]) -> bool:
        try:
            parts = self._parts(transfers)
            self._wait(self._events())
            todo = [part for part in self._resolve("get", parts) if part is not None]
            if not parts or len(todo) != len(parts):
                return False
            statuses = self.desk.get(todo)
        except Exception:  # noqa: BLE001 - whatever it is: the ranks must agree on it
            _LOG.exception("a load failed")
            self.tally.refused("get", KV, "error", 1)
            return False
        return all(all(status) for status in statuses)

    def start_layer_wise_loading(self) -> int:
        """Return the number under which a batch of loads, which are done, is waited for; -1 for none."""
        if not self._loaded:
            return -1
        self._loaded.clear()
        counter = self.layer_done_counter
        index = int(counter.update_producer())
        for layer in range(counter.num_layers):
            counter.complete(index, layer)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Return at once: loads are done before they are started."""
        return bool(self.layer_done_counter.finish(counter_index))

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load; nothing is written to its slots any more."""
        if rid not in self._loaded:
            return False
        self._loaded.discard(rid)
        return True

    # -- offloading ------------------------------------------------------------------------------------------

    @guarded("set", lambda *_, **__: False)
    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        """Store pages in the background; of ranks that hold the same bytes one does it."""
        del session_id
        parts = self._parts(transfers)
        if not parts:
            return False
        if self.ranks.replicated and not self.ranks.writer:
            self._offloads.submit(Offload(parts, stored=True))
        else:
            self._offloads.submit(Offload(parts, self._events()))
        return True

    def num_completed_offloads(self) -> int:
        """Count the oldest offloads that have an outcome."""
        return self._offloads.completed

    def pop_completed_offload(self) -> bool:
        """Return the outcome of the oldest."""
        return self._offloads.pop()

    def _store(self, offloads: Sequence[Offload]) -> list[bool]:
        """Store offloads together; on their thread."""
        for offload in offloads:
            self._wait(offload.ready)
        found = [self._resolve("set", offload.parts) for offload in offloads]
        todo = [pages for parts in found for pages in parts if pages is not None]
        together: dict[str, list[DevicePages]] = {}
        for pages in todo:
            together.setdefault(pages.pool.view.name, []).append(pages)
        merged = {name: _merged(self.stores[name], parts) for name, parts in together.items()}
        statuses = self._put(merged)
        at = dict.fromkeys(merged, 0)
        outcomes = []
        for parts in found:
            stored = True
            for one in parts:
                if one is None:
                    stored = False
                    continue
                name, count = one.pool.view.name, len(one.names)
                stored &= all(statuses[name][at[name] : at[name] + count])
                at[name] += count
            outcomes.append(stored)
        return outcomes

    def _put(self, merged: dict[str, DevicePages]) -> dict[str, list[PageStatus]]:
        """Store pages of several pools, side by side; as many at a time as storage writes in time."""
        statuses: dict[str, list[PageStatus]] = {name: [] for name in merged}
        while True:
            todo = {
                name: pages.part(len(statuses[name]), _ROUND * pages.pool.paces["set"].pages)
                for name, pages in merged.items()
                if len(statuses[name]) < len(pages.names)
            }
            if not todo:
                return statuses
            if self._offloads.stopping:
                verdicts = [[_GIVEN_UP] * len(part.names) for part in todo.values()]
            else:
                verdicts = self.desk.put(list(todo.values()))
            for name, verdict in zip(todo, verdicts, strict=True):
                statuses[name] += verdict

    # -- control ---------------------------------------------------------------------------------------------

    @guarded("reset", nothing)
    def reset(self) -> None:
        """Wait for what is under way; what is stored stays."""
        if not self._offloads.drain(time.monotonic() + _DRAIN_S):
            _LOG.error("storage hangs: offloads were given up")
        self._loaded.clear()
        self.layer_done_counter.reset()

    @guarded("close", nothing)
    def close(self) -> None:
        """Close the stores, within seconds."""
        if self._closed:
            return
        self._closed = True
        self.reset()
        self._offloads.close(time.monotonic() + 1.0)
        self.desk.close()
        self.stores = {}
        if self._exporter is not None:
            self._exporter.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _parts(self, transfers: Sequence[Any]) -> list[tuple[str, list[str], Any]]:
        """Return name, keys and slots for each pool that something is asked of."""
        by_source = {_text(one.name): one for one in transfers}
        found = []
        for name, store in self.stores.items():
            one = by_source.get(store.device_view.source)
            if one is not None and one.keys and one.device_indices is not None:
                found.append((name, list(one.keys), one.device_indices))
        return found

    def _resolve(self, op: str, parts: Sequence[tuple[str, list[str], Any]]) -> list[DevicePages | None]:
        """Return the pages of each pool; None, and counted, where the slots are not pages of it."""
        found: list[DevicePages | None] = []
        for name, keys, slots in parts:
            store = self.stores[name]
            try:
                numbers = store.device_view.pages(slots, len(keys), unique=op == "get")
            except InvalidArgumentError as error:
                _LOG.error("%s", error)
                self.tally.refused(op, name, "bad_indices", len(keys))
                found.append(None)
                continue
            pages = store.at(names_of(keys), numbers)
            if op == "set" and store.device_view.source == KV:
                pages.parents = [None, *pages.names[:-1]]
            found.append(pages)
        return found

    def _events(self) -> list[Any]:
        """Return what the device must have done before pages are read or written."""
        if not any(store.device_view.device.device.type == "cuda" for store in self.stores.values()):
            return []
        return list(self.record_offload_ready())

    @staticmethod
    def _wait(events: Sequence[Any]) -> None:
        for event in events:
            event.synchronize()

    def _agree(self, loaded: bool) -> bool:
        """Return whether all ranks that share a request say so."""
        if not self._groups:
            return loaded
        verdict = torch.tensor([int(loaded)], dtype=torch.int)
        for group in self._groups:
            torch.distributed.all_reduce(verdict, op=torch.distributed.ReduceOp.MIN, group=group)
        if loaded and not verdict.item():
            self.tally.refused("get", KV, "other_rank", 1)
        return bool(verdict.item())


def _pools(params: Any, components: Any, wanted: Wanted) -> DevicePools:  # noqa: ANN401 - SGLang's
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    if getattr(params, "pp_size", 1) > 1:
        raise InvalidArgumentError(
            "pipeline stages do not agree on what a linker found: --pp-size must be 1, or take HiCache."
        )
    if int(get_parallel().attn_dcp_size) > 1:
        raise InvalidArgumentError("decode context parallelism cannot be stored: --dcp-size must be 1.")

    def described() -> Any:  # noqa: ANN401 - DevicePoolGroup
        return resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=params.page_size, params=params, components=components
        )

    return device_pools(kvcache, [str(one) for one in components], wanted, described)


def _storage_config(params: Any, found: DevicePools) -> HiCacheStorageConfig:  # noqa: ANN401
    """Return the coordinates of this process, as HiCache would say them."""
    parallel, dp = get_parallel(), is_dp_attention_enabled()
    cp = params.attn_cp_cache_group
    return HiCacheStorageConfig(
        tp_rank=parallel.attn_tp_rank if dp else parallel.tp_rank,
        tp_size=parallel.attn_tp_size if dp else parallel.tp_size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0 if cp is None else torch.distributed.get_rank(group=cp),
        attn_cp_size=1 if cp is None else torch.distributed.get_world_size(group=cp),
        is_mla_model=found.replicated,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=get_serving().served_model_name,
        dp_rank=parallel.attn_dp_rank if dp else 0,
    )


def _groups(params: Any) -> list[Any]:  # noqa: ANN401
    """Return the groups of ranks that share requests, as SGLang's tree reduces over them."""
    wide = [
        group
        for group in (params.attn_cp_cache_group, params.attn_tp_cache_group)
        if group is not None and torch.distributed.get_world_size(group=group) > 1
    ]
    if wide:
        return wide
    group = params.tp_cache_group
    alone = group is None or torch.distributed.get_world_size(group=group) == 1
    return [] if alone else [group]


def _merged(store: DeviceStore, parts: Sequence[DevicePages]) -> DevicePages:
    """Return the pages of several offloads as one call's."""
    names = [name for pages in parts for name in pages.names]
    merged = store.at(names, torch.cat([torch.from_numpy(pages.numbers) for pages in parts]).numpy())
    merged.parents = [parent for pages in parts for parent in (pages.parents or [None] * len(pages.names))]
    return merged


def _text(name: Any) -> str:  # noqa: ANN401 - PoolName or text
    return str(getattr(name, "value", name))
