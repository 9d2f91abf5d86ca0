"""`inspect_root`: what a store holds, while others write to it or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.recfunctions import repack_fields

from hicache_tier.errors import FormatVersionError, StoreError

from .capacity import PARTITION_NAME
from .census import SlotState, stray_slabs, take_census
from .chains import Chains
from .documents import document_problems, read_state
from .encryption import ALGORITHM
from .inside import PARTITION_FILE
from .liveness import live_writers
from .metadata import read_attributes
from .partition_facts import PartitionFacts
from .record import FLAG_PINNED
from .state import boot_id
from .survey import survey
from .verification import verify_root

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    from .partition_files import PartitionPaths
    from .state import StateBlock
    from .survey import Namespace

__all__ = ["inspect_root", "verify_root"]

_COLUMNS = ("key", "parent", "created_ns", "access_s", "epoch", "flags", "sequence")
_AGES = ("oldest_created", "newest_created", "oldest_accessed", "newest_accessed")


def inspect_root(root: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the store at `root` holds. Writes nothing; works on live stores and read-only folders.

    Returns
    -------
    dict
        `namespaces`: a list of `{namespace, identity, damage, partitions}`; `foreign`: paths, relative to
        the root, of entries that the store did not make. A partition is `{rank, writer, pool, pages, bytes,
        capacity_bytes, page_nbytes, axes, logical_dtype, encryption, slabs, slots_per_slab, allocated_bytes,
        writer_live, clean, epoch, oldest_created, newest_created, oldest_accessed, newest_accessed (Unix
        seconds, None where there is no page), pinned, suspect_pages, unfinished,
        chains: {roots, leaves, longest, orphans}, damage}`. `bytes` is
        `pages * page_nbytes`. `writer_live`, `clean` and `epoch` are None where they cannot be told. Chains
        are followed across all writers of a rank; an orphan is a page that no prefix leads to.

    Raises
    ------
    NotAStoreError, FormatVersionError, StoreError
        Where `root` is no store, of a later version, or cannot be read.
    """
    found = survey(root)
    live = live_writers(found.root, found.partitions)
    namespaces = []
    for space in found.namespaces:
        reports = [_Report.of(paths, live[paths.root]) for paths in space.partitions]
        _follow_chains(reports)
        namespaces.append(
            {
                "namespace": space.name,
                "identity": space.identity,
                "damage": _namespace_damage(space),
                "partitions": [report.data for report in reports],
            }
        )
    return {"namespaces": namespaces, "foreign": found.foreign}


def _namespace_damage(space: Namespace) -> list[str]:
    return [space.problem] if space.problem else []


@dataclass(slots=True)
class _Report:
    """One partition: its plain data, and the key heads and parents of its pages for the chains."""

    data: dict[str, Any]
    heads: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    parents: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    @classmethod
    def of(cls, paths: PartitionPaths, live: bool | None) -> _Report:
        """Look at one partition."""
        damage: list[str] = []
        data = _empty(paths)
        data |= {"writer_live": live, "damage": damage}
        if not (paths.root / "zarr.json").exists():
            if paths.slab_numbers():
                damage.append("zarr.json is missing; the partition is not served")
            return cls(data)
        try:
            facts = PartitionFacts.read(paths)
            attributes = read_attributes(paths.root, PARTITION_FILE)
        except FormatVersionError:
            raise
        except StoreError as error:
            damage.append(str(error))
            return cls(data)
        state, problem = read_state(paths, facts)
        damage += [problem] if problem else []
        damage += document_problems(paths, facts, attributes.get("axis_order"))
        pages, slabs, unfinished, allocated = _collect(paths, facts, damage)
        damage += stray_slabs(paths, facts.page_axes)
        data |= {
            "pages": len(pages),
            "bytes": len(pages) * facts.geometry.page_nbytes,
            "capacity_bytes": facts.capacity_nbytes,
            "page_nbytes": facts.geometry.page_nbytes,
            "axes": _axes(attributes),
            "logical_dtype": facts.geometry.dtype.label,
            "encryption": ALGORITHM if facts.encrypted else None,
            "slabs": slabs,
            "slots_per_slab": facts.shape.slots,
            "allocated_bytes": allocated,
            "clean": state.clean if state else None,
            "epoch": state.epoch if state else None,
            "pinned": int((pages["flags"] & FLAG_PINNED != 0).sum()),
            "suspect_pages": _suspects(pages, state, live),
            "unfinished": unfinished,
            **_ages(pages),
        }
        heads = np.ascontiguousarray(pages["key"][:, :8]).view("<u8").ravel()
        return cls(data, heads, pages["parent"].astype(np.uint64))


def _empty(paths: PartitionPaths) -> dict[str, Any]:
    match = PARTITION_NAME.fullmatch(paths.root.parent.name)
    rank, writer = (match[1], int(match[2])) if match else (paths.root.parent.name, -1)
    return {
        "rank": rank,
        "writer": writer,
        "pool": paths.root.name,
        **dict.fromkeys(("pages", "bytes", "capacity_bytes", "slabs", "allocated_bytes"), 0),
        **dict.fromkeys(("pinned", "suspect_pages", "unfinished"), 0),
        **dict.fromkeys(
            ("page_nbytes", "logical_dtype", "encryption", "slots_per_slab", "clean", "epoch", *_AGES)
        ),
        "axes": [],
    }


def _collect(
    paths: PartitionPaths, facts: PartitionFacts, damage: list[str]
) -> tuple[NDArray[np.void], int, int, int]:
    """Return the pages served (some columns of their records), slabs, unfinished slots, bytes allocated."""
    parts, slabs, unfinished, allocated = [], 0, 0, 0
    for number in paths.slab_numbers():
        census = take_census(paths, facts, number)
        if census is None:
            continue
        allocated += census.nbytes
        _, records = census.records(SlotState.COMMITTED)
        if census.problem:
            damage.append(f"{census.problem}; {len(records)} pages are not served")
            continue
        slabs += 1
        unfinished += int((census.states == SlotState.UNFINISHED).sum())
        if census.reasons:
            damage.append(f"slots/c.{number}.0: {len(census.reasons)} damaged records")
        parts.append(repack_fields(records[list(_COLUMNS)]))
    if not parts:
        return np.zeros(0, [("key", "u1", (32,)), *((n, "<u8") for n in _COLUMNS[1:])]), slabs, 0, allocated
    return _newest(np.concatenate(parts)), slabs, unfinished, allocated


def _newest(pages: NDArray[np.void]) -> NDArray[np.void]:
    """Leave out older copies of a page that lies in two slots."""
    keys = np.ascontiguousarray(pages["key"])
    if len(np.unique(keys[:, :8].copy().view("<u8"))) == len(pages):
        return pages
    order = np.argsort(pages["sequence"], kind="stable")[::-1]
    _, first = np.unique(keys[order].view("V32").ravel(), return_index=True)
    return pages[np.sort(order[first])]


def _axes(attributes: dict[str, Any]) -> list[str]:
    names: list[str] = list(attributes["components"][0]["dimension_names"])
    shapes = {tuple(component["shape"]) for component in attributes["components"]}
    several = len(attributes["components"]) > 1 and len(shapes) == 1
    return ["kv", *names] if several else names


def _suspects(pages: NDArray[np.void], state: StateBlock | None, live: bool | None) -> int:
    """Count pages that the next read verifies: written under a boot that did not end cleanly."""
    if state is None:
        return len(pages)
    if state.clean or state.boot_id == boot_id():
        return 0
    return int((pages["epoch"] < state.epoch).sum()) if live else len(pages)


def _ages(pages: NDArray[np.void]) -> dict[str, float | int | None]:
    if not len(pages):
        return dict.fromkeys(_AGES)
    return {
        "oldest_created": int(pages["created_ns"].min()) / 1e9,
        "newest_created": int(pages["created_ns"].max()) / 1e9,
        "oldest_accessed": int(pages["access_s"].min()),
        "newest_accessed": int(pages["access_s"].max()),
    }


def _follow_chains(reports: list[_Report]) -> None:
    """Fill in `chains`, followed over all writers of one rank and pool: they share their pages."""
    groups: dict[tuple[str, str], list[_Report]] = {}
    for report in reports:
        groups.setdefault((report.data["rank"], report.data["pool"]), []).append(report)
    for group in groups.values():
        heads = np.concatenate([report.heads for report in group])
        chains = Chains.build(heads, np.concatenate([report.parents for report in group]))
        owner = np.repeat(np.arange(len(group)), [len(report.heads) for report in group])
        for at, report in enumerate(group):
            report.data["chains"] = chains.summary(owner == at)
