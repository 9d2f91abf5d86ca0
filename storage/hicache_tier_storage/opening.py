"""`open_store`: check what is asked for, find or make the namespace, take a partition."""

from __future__ import annotations

import logging
import os
import re
import resource
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_tier.errors import EncryptionError, InvalidArgumentError, NotAStoreError, StoreError
from hicache_tier.geometry import KVGeometry, PoolKind
from hicache_tier.layout import Layout

from .access import Access, Owners
from .asked_capacity import parse_capacity
from .bounded import DEADLINE_S
from .bounded_opening import check_deadline, open_bounded
from .capacity import LOCK_NAME, RootBudget, partition_paths
from .creation import lock_partition, refuse_link
from .encryption import EncryptionKey, match_key, stated_check
from .foreign import ForeignPages
from .identity import Identity
from .inside import NAMESPACE_FILE, PARTITION_FILE, RANK_FILE
from .locks import let_go
from .metadata import group_document, plain_group_document, read_attributes, write_document
from .placement import distinct_roots, split_capacity
from .posix import PosixEngine
from .probe import check_engine, choose_engine, is_network, one_of
from .roots import open_roots
from .slab import FileCache
from .state import boot_id
from .store import PageStore
from .writer import WriterPartition, check_capacity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .engine import ByteEngine

_LOG = logging.getLogger(__name__)
VERIFY = ("suspect", "always")


def check_root(root: Path, *, create: bool) -> None:
    """Refuse a root that is something else than a store, before anything is touched.

    Raises
    ------
    NotAStoreError
        For a file, or a directory with other things in it and no store.
    StoreError
        Where it cannot be read, or created.
    """
    if not root.exists():
        if not create:
            raise NotAStoreError(f"{root} does not exist.")
        return
    if not root.is_dir():
        raise NotAStoreError(f"{root} is not a directory.")
    try:
        names = [entry.name for entry in root.iterdir()]
    except OSError as error:
        raise StoreError(f"{root} cannot be read: {error.strerror}.") from error
    ours = LOCK_NAME in names or next(partition_paths(root), None) is not None
    if names and not ours and (not create or set(names) != {"lost+found"}):
        inside = next((folder for folder in root.parents if (folder / LOCK_NAME).exists()), None)
        advice = "Name an empty or new directory." if create else "Name the root of a store."
        if inside is not None:
            advice = f"It lies inside the store {inside}."
        raise NotAStoreError(
            f"{root} is not a store: it holds {len(names)} other entries "
            f"({', '.join(sorted(names)[:3])}, ...). {advice}"
        )
    if not names and not create:
        raise NotAStoreError(f"{root} is empty: there is no store in it.")
    if create and not os.access(root, os.W_OK | os.X_OK):
        raise StoreError(f"{root} cannot be written; open it with read_only=True to read what it holds.")


def file_limit() -> int:
    """Files a store may hold open: a quarter of the process's limit, at most 1024."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(1024, soft // 4) if soft != resource.RLIM_INFINITY else 1024


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
        No call takes longer, whatever storage does (opening: four times as long); see `BoundedStore`. None:
        calls are made on the caller's thread and take as long as they take.

    Raises
    ------
    InvalidArgumentError
        For a wrong argument.
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
    way = _Way(
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
    several = isinstance(root, list | tuple)
    paths = [_root_path(one) for one in (root if isinstance(root, list | tuple) else (root,))]

    def open_it() -> PageStore:
        if not several:
            return _open_root(paths[0], way, capacity_bytes, file_limit())
        roots = distinct_roots(paths)
        total = None if capacity_bytes is None else parse_capacity(capacity_bytes, roots[0])
        shares = split_capacity(roots, total)
        files = max(2, file_limit() // len(roots))
        return open_roots(roots, lambda path: _open_root(path, way, shares[path], files))

    return open_bounded(open_it, deadline_s, ", ".join(map(str, paths)))


@dataclass(frozen=True, slots=True)
class _Way:
    """How a store is opened, whichever root it lies in."""

    identity: Identity
    layout: Layout
    pool: str
    engine: str | ByteEngine
    io_mode: str
    threads: int | None
    verify: str
    checksums: bool
    read_only: bool
    access: Access
    owners: Owners
    key: EncryptionKey | None


def _open_root(path: Path, way: _Way, capacity_bytes: int | str | None, files: int) -> PageStore:
    """Open the store in one directory, with at most so many files open at once."""
    identity, read_only = way.identity, way.read_only
    refuse_link(path / identity.namespace)
    for folder in (path, path / identity.namespace):
        way.owners.check(folder)
    capacity_nbytes = parse_capacity(capacity_bytes, path)
    if not read_only:
        check_capacity(identity.geometry.page_nbytes, capacity_nbytes)
    check_root(path, create=not read_only)
    _check_key(path, way)
    chosen = _engine(path, way.engine, way.io_mode, way.threads, read_only=read_only)
    cache = FileCache(files)
    writer = foreign = None
    try:
        if not read_only:
            _make_root(path, way.access)
        budget = RootBudget(path, capacity_nbytes, way.access)
        if not read_only:
            writer = _take_partition(budget, identity, way.layout, cache, way.key)
        foreign = ForeignPages(
            path,
            identity.namespace,
            rank=identity.rank,
            pool=way.pool,
            own=writer.paths if writer else None,
            geometry=identity.geometry,
            cache=cache,
            boot=boot_id(),
            owners=way.owners,
            key=way.key,
        )
        return PageStore(
            identity=identity,
            layout=way.layout,
            budget=budget,
            engine=chosen,
            cache=cache,
            writer=writer,
            foreign=foreign,
            verify_always=way.verify == "always",
            verify_foreign=is_network(path),
            checksums=way.checksums,
            owns_engine=isinstance(way.engine, str),
            asked=way.engine if isinstance(way.engine, str) else "",
        )
    except BaseException as error:
        if foreign is not None:
            foreign.close()
        if writer is not None:
            writer.abandon()
        cache.close()
        if isinstance(way.engine, str):
            chosen.close()
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            raise StoreError(f"{path} cannot be opened: {error.strerror or error}.") from error
        raise


def _check_key(path: Path, way: _Way) -> None:
    """Refuse a namespace of a later version or another key, and no key where pages are encrypted."""
    identity, key = way.identity, way.key
    space = path / identity.namespace
    partitions = ((paths.root, PARTITION_FILE) for paths in partition_paths(path, identity.namespace))
    for folder, depth in chain([(space, NAMESPACE_FILE)], partitions):
        with suppress(NotAStoreError):  # it is new, or damaged: a writer writes it again
            check = stated_check(read_attributes(folder, depth), folder)
            match_key(key, check, identity.namespace, space)
            break
    other = path / replace(identity, encrypted=key is None).namespace
    if not other.is_dir():
        return
    if key is None:
        raise EncryptionError(
            f"{path} holds pages of this identity that are encrypted ({other.name}): name the key file they "
            "were made with (encryption=..., or --key-file), or remove that folder to keep pages unencrypted."
        )
    _LOG.warning(
        "%s holds pages of this identity that are not encrypted; they are not used: %s", path, other.name
    )


def _engine(
    path: Path, engine: str | ByteEngine, io_mode: str, threads: int | None, *, read_only: bool
) -> ByteEngine:
    if not isinstance(engine, str):
        return engine
    if read_only:  # a probe would have to write
        if engine in {"auto", "posix"}:
            return PosixEngine(direct=False, threads=threads)
        return choose_engine(Path(tempfile.gettempdir()), engine, "buffered", threads)
    return choose_engine(path, engine, io_mode, threads)


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


def _make_root(path: Path, access: Access) -> None:
    try:
        access.make_folder(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be created: {error.strerror}.") from error


def _take_partition(
    budget: RootBudget, identity: Identity, layout: Layout, cache: FileCache, key: EncryptionKey | None
) -> WriterPartition:
    space = budget.root / identity.namespace
    try:
        with budget.lock():
            budget.access.make_folder(space)
            try:
                read_attributes(space, NAMESPACE_FILE)
            except NotAStoreError as error:
                if (space / "zarr.json").exists():
                    _LOG.warning("%s It is written again.", error)
                check = "" if key is None else key.check_of(identity.namespace)
                document = group_document(identity.as_attributes(check))
                write_document(space, document, NAMESPACE_FILE, budget.access)
            paths, number, fd = lock_partition(space, identity.rank, identity.pool, budget.access)
            try:
                if not (paths.root.parent / "zarr.json").exists():  # or a reader's walk ends at the namespace
                    write_document(paths.root.parent, plain_group_document(), RANK_FILE, budget.access)
                return WriterPartition(
                    paths,
                    number,
                    fd,
                    rank=identity.rank,
                    pool=identity.pool,
                    geometry=identity.geometry,
                    layout=layout,
                    budget=budget,
                    cache=cache,
                    key=key,
                )
            except BaseException:
                let_go(fd)
                raise
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{budget.root} cannot be opened for writing: {error.strerror or error}.") from error
