"""`open_store`: check what is asked for, and open the store in every root."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import KVGeometry, PoolKind
from hicache_tier.keywords import named_options
from hicache_tier.layout import Layout

from .access import Access, Owners
from .asked_capacity import parse_capacity
from .bounded import DEADLINE_S
from .bounded_opening import check_deadline, open_bounded
from .encryption import EncryptionKey
from .identity import Identity
from .probe import check_engine, one_of
from .root_opening import Way, file_limit, open_root
from .roots_opening import open_roots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .engine import ByteEngine
    from .store import PageStore

VERIFY = ("suspect", "always")


@named_options
def open_store(
    root: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    geometry: KVGeometry,
    layout: Layout | str,
    *,
    model: str | None = None,
    revision: str | None = None,
    tenant: str | None = None,
    adapter: str | None = None,
    scales: str | None = None,
    rope: str | None = None,
    key_algorithm: str | None = "sha256-chain",
    tp: tuple[int, int] = (0, 1),
    pp: tuple[int, int] = (0, 1),
    cp: tuple[int, int] = (0, 1),
    pool: str | None = None,
    pools: Mapping[str, KVGeometry] | None = None,
    capacity_bytes: int | str | None = None,
    engine: str | ByteEngine = "auto",
    io_mode: str = "auto",
    threads: int | None = None,
    verify: str = "suspect",
    checksums: bool = True,
    read_only: bool = False,
    access: str | Access = "private",
    owners: str | Owners = "self",
    encryption: EncryptionKey | str | os.PathLike[str] | None = None,
    deadline_s: float | None = DEADLINE_S,
) -> PageStore:
    """Open a store, creating it where there is none.

    Parameters
    ----------
    root : path, or list of paths
        A directory for stores and nothing else. All namespaces and writers of a root share its capacity.
        Several directories (drives) make one store: see `SeveralRoots`.
    geometry : KVGeometry
        What one page of this rank holds.
    layout : Layout or str
        The host pool's. `layer_first` and `page_first_direct` store the same bytes and read each other's.
    model, revision, tenant, adapter, scales, rope, key_algorithm : str, optional
        Identity: pages stored under another value of any of them are misses. Absent differs from empty.
    tp, pp, cp : (rank, size)
        Parallel coordinates. An axis over which ranks hold the same bytes (tensor parallel for MLA and
        indexer pools) is left out: every rank reads what one wrote.
    pool : str, optional
        `kv`, or `indexer` for an indexer geometry, unless named otherwise.
    pools : mapping of str to KVGeometry, optional
        All pools that a prefix needs, this one included, where there are side pools: they share a namespace,
        each a partition beside the others, opened by a call of its own. See `usable_prefix`.
    capacity_bytes : int or str, optional
        Cap on the root, for all writers together, as bytes or `"100 GiB"`. Default: 64 GiB, at most a quarter
        of the disk that is free or held by this root. With several roots it is shared out by the sizes of
        their file systems.
    engine : str or ByteEngine
        `auto` (takes `posix`), `posix`, `nixl` or `kvikio` (insist), or an engine of your own.
    io_mode : str
        `auto` (O_DIRECT where the directory takes it), `direct` (insist), `buffered`.
    threads : int, optional
        I/O threads; default twice the cores, at most 8.
    verify : str
        `suspect`: check a page's checksum when this process first reads it, unless it wrote it itself, and on
        every read where power loss or another host may have touched it. `always`: on every read.
    checksums : bool
        Store a checksum with each page. Without one a page does not survive power loss.
    read_only : bool
        Read what others wrote; take no partition.
    access : str
        Who beside this user may use what is made: `private` (files 0600, folders 0700), `group_read` (0640,
        0750) or `group` (0660, 2770). A root that is there keeps its own permissions.
    owners : str
        `self`: a root, namespace or partition of another user than this one and root is refused, or passed
        over. `any`: taken all the same, as a group that shares a root needs.
    encryption : EncryptionKey, path or str, optional
        Encrypt pages with AES-256-GCM by this key: the path of a file of 64 hex digits, or `env:NAME` for an
        environment variable that holds them. Keys of pages, times and sizes are not hidden.
    deadline_s : float, optional
        No call takes longer, whatever storage does (opening: four times as long); see `BoundedStore`. Of
        several roots those that hang are left out. None: calls are made on the caller's thread and take as
        long as they take.

    Raises
    ------
    InvalidArgumentError
        For a wrong argument, or an option that is not known.
    NotAStoreError, FormatVersionError, StoreFullError, StoreError
        Where `root` cannot be used as asked. Nothing was changed.
    EncryptionError
        Where the pages that are there are encrypted with another key, or were not asked for as encrypted.
    EngineUnavailableError
        Where the engine or mode that was insisted on does not work there.
    """
    if not isinstance(geometry, KVGeometry):
        raise InvalidArgumentError(f"geometry must be a KVGeometry, got {type(geometry).__name__}.")
    layout = Layout.parse(layout)
    _check_options(geometry, layout, verify)
    check_engine(engine, io_mode, threads)
    check_deadline(deadline_s)
    pool = _pool_name(pool, geometry)
    key = EncryptionKey.parse(encryption)
    identity = Identity.build(
        geometry,
        layout,
        pool=pool,
        beside=_beside(pool, geometry, pools),
        model=model,
        revision=revision,
        tenant=tenant,
        adapter=adapter,
        scales=scales,
        rope=rope,
        key_algorithm=key_algorithm,
        tp=tp,
        pp=pp,
        cp=cp,
        encrypted=key is not None,
    )
    way = Way(
        identity,
        layout,
        pool,
        engine,
        io_mode,
        threads,
        verify,
        checksums,
        read_only,
        Access.parse(access),
        Owners.parse(owners),
        key,
    )
    if not isinstance(root, list | tuple):
        path = _root_path(root)
        return open_bounded(path, lambda: open_root(path, way, capacity_bytes, file_limit()), deadline_s)
    paths = [_root_path(one) for one in root]
    if not paths:
        raise InvalidArgumentError("root must name one directory at least, got an empty list.")
    files = max(2, file_limit() // len(paths))
    total = None if capacity_bytes is None else parse_capacity(capacity_bytes, paths[0])
    return open_roots(paths, lambda path, share: open_root(path, way, share, files), total, deadline_s)


def _check_options(geometry: KVGeometry, layout: Layout, verify: str) -> None:
    if layout is Layout.PAGE_HEAD and geometry.kind is not PoolKind.MHA:
        raise InvalidArgumentError(f"page_head needs heads; {geometry.kind.value} pools have none.")
    one_of("verify", verify, VERIFY)


def _beside(
    pool: str, geometry: KVGeometry, pools: Mapping[str, KVGeometry] | None
) -> tuple[tuple[str, KVGeometry], ...]:
    """Check a pool set and return the other pools of it."""
    if pools is None:
        return ()
    for name, other in pools.items():
        if not isinstance(other, KVGeometry):
            raise InvalidArgumentError(f"pools[{name!r}] must be a KVGeometry, got {type(other).__name__}.")
        _pool_name(name, other)
    if pools.get(pool) != geometry:
        raise InvalidArgumentError(
            f"pools must name every pool, this one included: pools[{pool!r}] is not the geometry given."
        )
    return tuple(sorted((name, other) for name, other in pools.items() if name != pool))


def _pool_name(pool: object, geometry: KVGeometry) -> str:
    if pool is None:
        return "indexer" if geometry.kind is PoolKind.INDEXER else "kv"
    if not (isinstance(pool, str) and re.fullmatch(r"[A-Za-z0-9_]{1,32}", pool)):
        raise InvalidArgumentError(f"pool must be 1 to 32 letters, digits or '_', got {pool!r}.")
    return pool


def _root_path(root: object) -> Path:
    if not isinstance(root, str | os.PathLike) or not os.fspath(root) or "\0" in str(root):
        raise InvalidArgumentError(f"root must be the path of a directory, got {root!r}.")
    return Path(root).absolute()
