"""Which pages a store holds at one moment, in 16 bytes each, 40 where they are to be ranked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier_storage.census import SlotState, take_census
from hicache_tier_storage.record import CHECKSUM_NONE, key_heads, keys_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from .stores import PartSource

_PARTITION_SHIFT = np.uint64(40)
_SLOT_MASK = np.uint64((1 << 40) - 1)


@dataclass(slots=True)
class Candidates:
    """Pages of a part to export, ascending by place; one entry each.

    Attributes
    ----------
    places : uint64 [n]
        Number of the partition within the part, shifted by 40, and slot.
    names : uint64 [n]
        Hash of the whole key: what tells whether a slot still holds that page.
    heads, parents, scores : uint64 [n], or empty where pages are not ranked
        First 8 bytes of the key and of the parent's, and what a page is worth.
    left_out : dict
        Pages of the part that are not candidates, by reason.
    """

    places: NDArray[np.uint64]
    names: NDArray[np.uint64]
    heads: NDArray[np.uint64]
    parents: NDArray[np.uint64]
    scores: NDArray[np.uint64]
    left_out: dict[str, int]

    def __len__(self) -> int:
        return len(self.places)

    def take(self, chosen: NDArray[np.bool_]) -> Candidates:
        """Return the chosen pages."""
        columns = (getattr(self, name) for name in _COLUMNS)
        return Candidates.of([column[chosen] if len(column) else column for column in columns], self.left_out)

    @classmethod
    def of(cls, columns: list[NDArray[np.uint64]], left_out: dict[str, int]) -> Candidates:
        """Make one of its columns."""
        places, names, heads, parents, scores = columns
        return cls(places, names, heads, parents, scores, left_out)


_COLUMNS = ("places", "names", "heads", "parents", "scores")


def key_names(keys: NDArray[np.uint8], lengths: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """64-bit hash of each zero-padded key `uint8 [n, 32]` and its length."""
    words = np.ascontiguousarray(keys).view("<u8")
    mixed = lengths.astype(np.uint64)
    for column in range(words.shape[1]):
        mixed = _mix(mixed ^ words[:, column])
    return mixed


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    value = (value ^ (value >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return value ^ (value >> np.uint64(32))


def split_places(places: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of the partition and the slot of each place."""
    return (places >> _PARTITION_SHIFT).astype(np.int64), (places & _SLOT_MASK).astype(np.int64)


def list_pages(part: PartSource, keys: Collection[bytes] | None, rank_by: str = "") -> Candidates:
    """List the committed pages of a part, each key once.

    Parameters
    ----------
    part : PartSource
    keys : collection of bytes, optional
        Those wanted, where not all are.
    rank_by : str
        Field of the slot records that says what a page is worth; pages are not ranked where it is empty.
    """
    columns: list[list[NDArray[np.uint64]]] = [[] for _ in _COLUMNS]
    left_out = {"unverifiable": 0, "damaged": 0, "not_selected": 0, "copies": 0}
    wanted = None if keys is None else frozenset(keys)
    for at, source in enumerate(part.partitions):
        for number in source.paths.slab_numbers():
            census = take_census(source.paths, source.facts, number)
            if census is None:
                continue
            index, records = census.records(SlotState.COMMITTED)
            left_out["damaged"] += len(census.reasons)
            if census.problem:
                left_out["damaged"] += len(records)
                continue
            sound = records["algorithm"] != CHECKSUM_NONE if source.suspect else np.ones(len(records), bool)
            left_out["unverifiable"] += int((~sound).sum())
            if wanted is not None:
                chosen = np.fromiter((key in wanted for key in keys_of(records)), bool, len(records))
                left_out["not_selected"] += int((sound & ~chosen).sum())
                sound &= chosen
            index, records = index[sound], records[sound]
            slots = index.astype(np.uint64) + np.uint64(number * source.facts.shape.slots)
            columns[0].append(slots | np.uint64(at) << _PARTITION_SHIFT)
            columns[1].append(key_names(records["key"], records["key_nbytes"]))
            if rank_by:
                columns[2].append(key_heads(records))
                columns[3].append(records["parent"].astype(np.uint64))
                columns[4].append(records[rank_by].astype(np.uint64))
    none = np.zeros(0, np.uint64)
    return _once(Candidates.of([np.concatenate([none, *column]) for column in columns], left_out))


def _once(found: Candidates) -> Candidates:
    """Leave out copies of a page that lies in more than one slot."""
    _, first = np.unique(found.names, return_index=True)
    if len(first) == len(found):
        return found
    keep = np.zeros(len(found), np.bool_)
    keep[first] = True
    found.left_out["copies"] += int((~keep).sum())
    return found.take(keep)
