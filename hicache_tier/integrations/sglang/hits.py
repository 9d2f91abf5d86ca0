"""How many pages of a prefix are of use, given which pages each pool has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from hicache_tier.errors import not_known

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class HitPolicy(Enum):
    """What a side pool must have for a prefix to be restored."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"

    @classmethod
    def parse(cls, value: object) -> HitPolicy:
        """Take SGLang's member, whose value is one of these names, or the name."""
        name = getattr(value, "value", value)
        allowed = [member.value for member in cls]
        if name in allowed:
            return cls(name)
        raise not_known("hit policy", name, allowed)


@dataclass(frozen=True, slots=True)
class SidePool:
    """What one side pool asks for, and has.

    Attributes
    ----------
    name : str
    policy : HitPolicy
    present : sequence of bool
        For each page of the prefix, whether the pool has it. For `BLOCK_GROUPS`: for each page of its groups,
        one group after the other.
    trailing : int
        For `TRAILING_PAGES`: pages that must be there up to the end of the prefix.
    block_pages, group_pages : int
        For `BLOCK_GROUPS`: pages of the prefix that a group stands for, and pages of the pool a group has.
    """

    name: str
    policy: HitPolicy
    present: Sequence[bool]
    trailing: int = 1
    block_pages: int = 0
    group_pages: int = 0

    def ends(self, pages: int) -> set[int]:
        """Lengths of prefix, 1 to `pages`, that this pool can restore."""
        if self.policy is HitPolicy.BLOCK_GROUPS:
            return set(range(1, pages + 1))
        if self.policy is HitPolicy.ALL_PAGES:
            return set(range(1, leading(self.present[:pages]) + 1))
        found: set[int] = set()
        run = 0
        for length, there in enumerate(self.present[:pages], 1):
            run = run + 1 if there else 0
            if run >= min(self.trailing, length):
                found.add(length)
        return found

    def covered(self, span: int) -> int:
        """Pages of a span of `span` pages that the leading complete groups stand for."""
        if self.block_pages <= 0 or self.group_pages <= 0:
            return 0
        return min(span, leading(self.present) // self.group_pages * self.block_pages)


@dataclass(frozen=True, slots=True)
class Hit:
    """Answer to `batch_exists_v2`.

    Attributes
    ----------
    pages : int
        Longest prefix that every pool can restore.
    by_pool : dict
        For each pool that has any, how far it reaches.
    restorable : list of int
        Every length of prefix that can be restored, ascending.
    """

    pages: int
    by_pool: dict[str, int]
    restorable: list[int]


def leading(present: Iterable[bool]) -> int:
    """Count the leading true values."""
    count = 0
    for there in present:
        if not there:
            break
        count += 1
    return count


def combine(anchor: str, anchor_pages: int, span: int, pools: Sequence[SidePool]) -> Hit:
    """Combine what the anchor pool has with what side pools have.

    Parameters
    ----------
    anchor : str
        Name of the anchor pool.
    anchor_pages : int
        Leading pages that it has.
    span : int
        Pages asked for.
    pools : sequence of SidePool
        In the order in which SGLang named them. Once no prefix is left the rest are not looked at, but for
        groups, which stand for pages of the anchor and never gate it.
    """
    by_pool = {anchor: anchor_pages} if anchor_pages else {}
    restorable = list(range(1, anchor_pages + 1))
    for pool in pools:
        if pool.policy is HitPolicy.BLOCK_GROUPS:
            reach = pool.covered(span)
        elif restorable:
            ends = pool.ends(anchor_pages)
            reach = max(ends, default=0)
            restorable = [length for length in restorable if length in ends]
        else:
            continue
        if reach:
            by_pool[pool.name] = reach
    return Hit(restorable[-1] if restorable else 0, by_pool, restorable)
