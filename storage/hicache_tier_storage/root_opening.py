"""Opening the store in one directory: its key, its engine, the namespace, a partition."""

from __future__ import annotations

import logging
import resource
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_tier.errors import EncryptionError, EngineUnavailableError, NotAStoreError, StoreError

from .asked_capacity import check_capacity, parse_capacity
from .capacity import RootBudget, partition_paths
from .creation import lock_partition, refuse_link
from .encryption import match_key, stated_check
from .foreign import ForeignPages
from .inside import NAMESPACE_FILE, PARTITION_FILE, RANK_FILE
from .locks import let_go
from .metadata import group_document, plain_group_document, read_attributes, write_document
from .posix import PosixEngine
from .probe import choose_engine, is_network
from .root_check import check_root
from .slab import FileCache
from .state import boot_id
from .store import PageStore
from .writer import WriterPartition

if TYPE_CHECKING:
    from hicache_tier.layout import Layout

    from .access import Access, Owners
    from .encryption import EncryptionKey
    from .engine import ByteEngine
    from .identity import Identity

_LOG = logging.getLogger(__name__)


def file_limit() -> int:
    """Files a store may hold open: a quarter of the process's limit, at most 1024."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(1024, soft // 4) if soft != resource.RLIM_INFINITY else 1024


@dataclass(frozen=True, slots=True)
class Way:
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


def open_root(path: Path, way: Way, capacity_bytes: int | str | None, files: int) -> PageStore:
    """Open the store in one directory, with at most so many files open at once.

    Raises
    ------
    StoreError
        Also for whatever the operating system says of a drive that does not work.
    """
    try:
        return _open_root(path, way, capacity_bytes, files)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror or error}.") from error


def _open_root(path: Path, way: Way, capacity_bytes: int | str | None, files: int) -> PageStore:
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
    except BaseException:
        if foreign is not None:
            foreign.close()
        if writer is not None:
            writer.abandon()
        cache.close()
        if isinstance(way.engine, str):
            chosen.close()
        raise


def _check_key(path: Path, way: Way) -> None:
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
    try:
        return choose_engine(path, engine, io_mode, threads)
    except EngineUnavailableError as error:
        if engine != "auto" or io_mode == "direct":  # insisted on
            raise
        raise StoreError(f"{path} cannot be used: {error}") from error  # nor do ordinary writes work there


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
