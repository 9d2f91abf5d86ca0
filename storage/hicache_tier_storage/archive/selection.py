"""Which pages of a store an export takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_tier.errors import InvalidArgumentError, not_known

from .ranking import Ranking

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from .candidates import Candidates
    from .stores import PartSource

FIRST = ("newest", "used")


@dataclass(frozen=True, slots=True)
class Selection:
    """What is wanted; every part that is given narrows it.

    Attributes
    ----------
    namespaces : tuple of str
        First digits of namespaces; all where there are none.
    keys : frozenset of bytes, optional
        As stored.
    prompts : tuple
        Token ids of prompts, uint32 arrays: the pages of their prefixes.
    tenants : tuple of str
        Salts that keys of prompts may have been made with.
    max_nbytes : int, optional
        Payload to take at most, whole prefixes first.
    first : str
        What goes first then: `newest` by creation, `used` by last use.
    """

    namespaces: tuple[str, ...] = ()
    keys: frozenset[bytes] | None = None
    prompts: tuple[NDArray[np.uint32], ...] | None = None
    tenants: tuple[str, ...] = field(default=(), repr=False)
    max_nbytes: int | None = None
    first: str = "used"

    def __post_init__(self) -> None:
        if self.first not in FIRST:
            raise InvalidArgumentError(f"first must be one of {', '.join(FIRST)}, got {self.first!r}.")

    def takes(self, namespace: str) -> bool:
        """Whether pages of a namespace may be wanted."""
        return not self.namespaces or any(namespace.startswith(start) for start in self.namespaces)

    @property
    def rank_by(self) -> str:
        """Field of the slot records that says what a page is worth; empty where all of them are taken."""
        if self.max_nbytes is None:
            return ""
        return "created_ns" if self.first == "newest" else "access_s"

    def as_dict(self) -> dict[str, Any]:
        """Return what tells this selection from others, as plain data."""
        import hashlib

        keys = None if self.keys is None else hashlib.sha256(b"".join(sorted(self.keys))).hexdigest()
        prompts = None
        if self.prompts is not None:
            digest = hashlib.sha256()
            salts = (salt.encode() for salt in sorted(self.tenants))
            for part in (*(prompt.tobytes() for prompt in self.prompts), *salts):
                digest.update(len(part).to_bytes(8, "little") + part)
            prompts = digest.hexdigest()
        return {
            "namespaces": sorted(self.namespaces),
            "keys": keys,
            "prompts": prompts,
            "max_nbytes": self.max_nbytes,
            "first": self.first,
        }


def check_namespaces(wanted: Sequence[str], there: Iterable[str]) -> None:
    """Refuse first digits that no namespace begins with.

    Raises
    ------
    InvalidArgumentError
        Naming the namespaces that are there.
    """
    spaces = sorted({*there})
    for start in wanted:
        if not any(space.startswith(start) for space in spaces):
            raise not_known("namespace", start, spaces or ["none is there"])


def limit(
    selection: Selection, listed: list[tuple[PartSource, Candidates]]
) -> list[tuple[PartSource, Candidates]]:
    """Keep the best pages whose payload fits `selection.max_nbytes`.

    A page counts with the score of the best page that continues it, so that what is kept are whole prefixes,
    and the same of every rank and pool of a namespace. Pages that no prefix leads to go last.
    """
    if selection.max_nbytes is None or not listed:
        return listed
    spaces: dict[str, list[tuple[PartSource, Candidates]]] = {}
    for part, found in listed:
        spaces.setdefault(part.name.namespace, []).append((part, found))
    rankings = [_ranking(group) for group in spaces.values()]
    kept = dict(zip(spaces, Ranking.chosen(rankings, selection.max_nbytes), strict=True))
    result = []
    for part, found in listed:
        inside = np.isin(found.heads, kept[part.name.namespace])
        found.left_out["over_size"] = int((~inside).sum())
        result.append((part, found.take(inside)))
    return result


def _ranking(group: list[tuple[PartSource, Candidates]]) -> Ranking:
    return Ranking.of(
        np.concatenate([found.heads for _, found in group]),
        np.concatenate([found.parents for _, found in group]),
        np.concatenate([found.scores for _, found in group]),
        np.concatenate([np.full(len(found), part.geometry.page_nbytes) for part, found in group]),
    )
