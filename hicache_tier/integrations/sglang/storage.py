"""`HiCacheTierStorage`: SGLang's storage plug-in contract, met by stores of this project."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.metrics import Exporter

from .desk import Desk
from .facts import kv_cache_dtype, server_arguments, weight_version
from .guard import guarded, none_of, nothing
from .hits import HitPolicy, SidePool, combine
from .names import LookedUp, name_of, names_of
from .options import Options
from .pool import Pages, Pool
from .ranks import Ranks
from .statistics import storage_metrics
from .tally import Tally
from .view import PoolView

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from hicache_tier_storage import PageStatus

_LOG = logging.getLogger(__name__)
_KV = PoolName.KV.value


def _misses(keys: Any = (), *_: object, **__: object) -> list[torch.Tensor | None]:  # noqa: ANN401
    return [None] * len(none_of(keys))


def _none_of_pools(transfers: Any = (), *_: object, **__: object) -> dict[Any, list[bool]]:  # noqa: ANN401
    return {one.name: none_of(one.keys) for one in transfers or () if one is not None}


class HiCacheTierStorage(HiCacheStorage):  # type: ignore[misc]
    """Storage below SGLang's host pools.

    Loaded by `--hicache-storage-backend dynamic`; see the README. Once pools are registered no method raises:
    what goes wrong is a miss, or not stored, and counted by reason. No byte of a host pool is written after
    the call that asked for it has returned.

    Parameters
    ----------
    storage_config : HiCacheStorageConfig
    extra : object
        What the factory passes beside it; not used.

    Raises
    ------
    InvalidArgumentError
        For an option that is not known or not allowed. It is a ValueError, so that SGLang refuses the attach
        with its text.
    """

    def __init__(self, storage_config: Any, extra: object = None, **later: object) -> None:  # noqa: ANN401
        del extra, later
        self.options = Options.parse(storage_config.extra_config)
        self.ranks = Ranks.of(storage_config, self.options.model)
        self._exporter: Exporter | None = None
        if self.options.metrics:
            port = self.options.metrics_port
            self._exporter = Exporter(
                None if port is None else port + self.ranks.number, self.options.metrics_address
            )
        self.tally = Tally(self.ranks.label, self._exporter.instruments if self._exporter else None)
        self.desk = Desk(self.options, self.tally, weights=weight_version)
        self._looked_up = LookedUp()
        self.registered_pools: dict[str, Any] = {}
        self._registering = threading.Lock()
        self._closed = False

    # -- registration ----------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:  # noqa: ANN401 - SGLang's
        """Take the anchor pool."""
        self.mem_pool_host = mem_pool_host
        self._register(mem_pool_host, _KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:  # noqa: ANN401 - SGLang's
        """Take any pool, the anchor once more."""
        self._register(host_pool, _text(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """Say what was opened."""
        for name, pool in self.desk.pools.items():
            _LOG.info("pool %s: %r", name, pool.store)

    def _register(self, host_pool: Any, name: str) -> None:  # noqa: ANN401 - SGLang's
        try:
            self._open(host_pool, name)
        except BaseException:
            self.close()  # SGLang leaves it open where a pool after the first is refused
            raise

    def _open(self, host_pool: Any, name: str) -> None:  # noqa: ANN401 - SGLang's
        with self._registering:
            known = self.desk.pools.get(name)
            host_pool = getattr(getattr(host_pool, "anchor_entry", None), "host_pool", host_pool)
            if known is not None and known.view.pool is host_pool:
                return
            arguments = server_arguments()
            view = PoolView(host_pool, name, kv_cache_dtype(arguments, draft=name.startswith("draft")))
            pool = self.desk.open(lambda: Pool(view, self.options, self.ranks, arguments))
            self.registered_pools[name] = host_pool
            self.desk.pools[name] = pool
            if known is not None:
                known.store.close()
        if view.copied:
            _LOG.warning(
                "pool %s (%s, %s) does not say where its pages lie: they are copied one by one",
                name,
                type(host_pool).__name__,
                host_pool.layout,
            )
        if self.ranks.replicated and not pool.replicated and not self.ranks.writer and name != "mamba":
            _LOG.warning("pool %s differs from rank to rank, and SGLang has only one rank write it", name)

    # -- zero-copy, the anchor pool --------------------------------------------------------------------------

    @guarded("exists", lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """Count the leading pages that are stored; answered from memory."""
        del extra_info
        pool = self.desk.pools.get(_KV)
        if pool is None or not self.desk.may_look():
            self.tally.lookup(len(keys), 0)
            return 0
        found = pool.match(self._names_looked_up(keys))
        self.tally.lookup(len(keys), found)
        return found

    @guarded("get", none_of)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Load pages of the anchor pool; only the leading run of True counts."""
        del extra_info
        return self._in_pools("get", [(_KV, keys, host_indices)])[0]

    @guarded("set", none_of)
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:  # noqa: ANN401
        """Store pages of the anchor pool; True where the page is stored now, or was already."""
        return self._in_pools("set", [(_KV, keys, host_indices)], extra_info)[0]

    # -- several pools ---------------------------------------------------------------------------------------

    @guarded("exists", lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Sequence[Any] | None = None,
        extra_info: object = None,
    ) -> Any:  # noqa: ANN401 - PoolTransferResult
        """Tell which lengths of a prefix every pool can restore; answered from memory."""
        del extra_info
        anchor = self.desk.pools.get(_KV)
        if anchor is None or not self.desk.may_look():
            self.tally.lookup(len(keys), 0)
            return PoolTransferResult.empty()
        names = self._names_looked_up(keys)
        sides = [self._side_pool(transfer, names) for transfer in pool_transfers or ()]
        hit = combine(_KV, anchor.match(names), len(keys), sides)
        self.tally.lookup(len(keys), hit.pages)
        return PoolTransferResult(hit.pages, dict(hit.by_pool), hit.restorable)

    @guarded("get", _none_of_pools)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: object = None) -> dict[Any, list[bool]]:
        """Load pages of several pools, side by side."""
        del extra_info
        return self._transfer("get", transfers, None)

    @guarded("set", _none_of_pools)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:  # noqa: ANN401
        """Store pages of several pools, side by side."""
        return self._transfer("set", transfers, extra_info)

    def _transfer(self, op: str, transfers: Sequence[Any], extra_info: Any) -> dict[Any, list[bool]]:  # noqa: ANN401
        parts = [(_text(one.name), list(one.keys or []), one.host_indices) for one in transfers]
        chained = [_text(one.hit_policy) == HitPolicy.ALL_PAGES.value for one in transfers]
        answers = self._in_pools(op, parts, extra_info, chained)
        return {one.name: answer for one, answer in zip(transfers, answers, strict=True)}

    def _side_pool(self, transfer: Any, names: list[bytes]) -> SidePool:  # noqa: ANN401 - PoolTransfer
        """Return what one side pool asks for, and has."""
        policy = HitPolicy.parse(transfer.hit_policy)
        keys = list(transfer.keys or [])
        block, group = int(getattr(transfer, "block_pages", 0)), int(getattr(transfer, "group_pages", 0))
        wanted = names
        if policy is HitPolicy.BLOCK_GROUPS:
            wanted = names_of(keys) if keys else _at_boundaries(names, block, group)
        pool = self.desk.pools.get(_text(transfer.name))
        present = [False] * len(wanted) if pool is None else pool.contains(wanted)
        return SidePool(transfer.name, policy, present, max(1, len(keys)), block, group)

    # -- copying ---------------------------------------------------------------------------------------------

    @guarded("get", _misses)
    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        """Load pages of the anchor pool into tensors of their own; None for a miss."""
        del target_sizes
        pool = self.desk.pools.get(_KV)
        if pool is None:
            return [None] * len(keys)
        targets = (
            list(target_locations) if target_locations is not None else [pool.view.blank() for _ in keys]
        )
        if len(targets) != len(keys) or not all(_fits(pool, one) for one in targets):
            self.tally.refused("get", _KV, "bad_tensor", len(keys))
            return [None] * len(keys)
        places = [one if one.is_contiguous() else torch.empty_like(one).contiguous() for one in targets]
        (statuses,) = self.desk.get([pool.in_tensors(names_of(keys), places)])
        found: list[torch.Tensor | None] = []
        for target, place, status in zip(targets, places, statuses, strict=True):
            if status and place is not target:
                target.copy_(place)
            found.append(target if status else None)
        return found

    @guarded("set", lambda *_, **__: False)
    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Store pages of the anchor pool out of tensors; True where all of them are stored."""
        del target_locations, target_sizes
        pool = self.desk.pools.get(_KV)
        given = list(values or [])
        if pool is None or len(given) != len(keys) or not all(_fits(pool, one) for one in given):
            self.tally.refused("set", _KV, "bad_tensor", len(keys))
            return False
        pages = pool.in_tensors(names_of(keys), [one.contiguous() for one in given])
        pages.parents = _parents(pages.names, None)
        return all(self.desk.put([pages])[0])

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        """Load one page of the anchor pool into a tensor."""
        return self.batch_get([key], None if target_location is None else [target_location], target_sizes)[0]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Store one page of the anchor pool out of a tensor."""
        return self.batch_set([key], None if value is None else [value], target_location, target_sizes)

    def exists(self, key: str) -> bool:
        """Tell whether a page of the anchor pool is stored."""
        return bool(self.batch_exists([key]))

    # -- control ---------------------------------------------------------------------------------------------

    @guarded("stats", nothing)
    def get_stats(self) -> Any:  # noqa: ANN401 - StorageMetrics or None
        """Return what was moved since the last time, in SGLang's own class; None where nothing was."""
        return storage_metrics(self.tally.drain())

    @guarded("clear", lambda: False)
    def clear(self) -> bool:
        """Remove the pages that this process stored; pages of other servers stay."""
        return self.desk.clear()

    @guarded("close", nothing)
    def close(self) -> None:
        """Close the stores, within seconds."""
        if self._closed:
            return
        self._closed = True
        self.desk.close()
        if self._exporter is not None:
            self._exporter.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _names_looked_up(self, keys: list[str]) -> list[bytes]:
        names = names_of(keys)
        self._looked_up.note(keys, names)
        return names

    def _in_pools(
        self,
        op: str,
        parts: Sequence[tuple[str, list[str], torch.Tensor | None]],
        extra_info: Any = None,  # noqa: ANN401 - HiCacheStorageExtraInfo
        chained: Sequence[bool] | None = None,
    ) -> list[list[bool]]:
        """Move pages of pools, where they lie; what is asked wrongly fails, and is counted."""
        answers = [[False] * len(keys) for _, keys, _ in parts]
        todo: list[tuple[int, Pages, NDArray[np.int64]]] = []
        for at, (name, keys, indices) in enumerate(parts):
            pool = self.desk.pools.get(name)
            if not keys:
                continue
            if pool is None or indices is None:
                self.tally.refused(op, name, "not_registered" if pool is None else "no_indices", len(keys))
                continue
            try:
                numbers = pool.view.pages(indices, len(keys), unique=op == "get")
            except InvalidArgumentError as error:
                _LOG.error("%s", error)
                self.tally.refused(op, name, "bad_indices", len(keys))
                continue
            names = self._looked_up.names_of(keys) if op == "get" else names_of(keys)
            pages = _pages(pool, op, names, numbers)
            if op == "set" and (chained is None or chained[at]):
                pages.parents = _parents(pages.names, extra_info)
            todo.append((at, pages, numbers))
        move = self.desk.get if op == "get" else self.desk.put
        statuses = move([pages for _, pages, _ in todo]) if todo else []
        for (at, pages, where), status in zip(todo, statuses, strict=True):
            answers[at] = _settle(pages, op, where, status)
        return answers


def _pages(pool: Pool, op: str, names: list[bytes], numbers: NDArray[np.int64]) -> Pages:
    if not pool.view.copied:
        return pool.in_place(names, numbers)
    view = pool.view
    return pool.in_tensors(names, [view.flat(int(page)) if op == "set" else view.blank() for page in numbers])


def _settle(pages: Pages, op: str, numbers: NDArray[np.int64], status: Sequence[PageStatus]) -> list[bool]:
    """Return the verdicts; pages that were read to memory of their own are put in their places."""
    view = pages.pool.view
    if view.copied and op == "get":
        for page, tensor, ok in zip(numbers.tolist(), pages.memory.tensors, status, strict=True):
            if ok:
                view.put_back(page, tensor)
    return list(map(bool, status))


def _parents(names: list[bytes], extra_info: Any) -> list[bytes | None]:  # noqa: ANN401
    """Return the page before each: that of the first where SGLang was told to pass prefix keys."""
    before = getattr(extra_info, "prefix_keys", None)
    return [name_of(before[-1]) if before else None, *names[:-1]]


def _at_boundaries(names: list[bytes], block: int, group: int) -> list[bytes]:
    """Return the keys of groups that are named by the last pages of each whole block."""
    if block <= 0 or not 0 < group <= block:
        return []
    return [name for end in range(block, len(names) + 1, block) for name in names[end - group : end]]


def _fits(pool: Pool, tensor: object) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cpu"
        and (pool.view.marker or tensor.numel() * tensor.element_size() == pool.view.geometry.page_nbytes)
    )


def _text(name: Any) -> str:  # noqa: ANN401 - PoolName or text
    return str(getattr(name, "value", name))
