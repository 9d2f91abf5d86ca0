"""Keys of pages of another size, from the token ids that an archive holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_tier.keys import chain_keys
from hicache_tier_storage.record import key_head, keys_of

from .prompts import chain_roots
from .rows import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .reader import ArchivePart

NO_TOKENS = "page_tokens: the archive holds no token ids of it, which keys of another size need"
NO_CHAIN = "page_tokens: a page before it is not in the archive, or its key is made in another way"
NO_GROUP = "page_tokens: the pages that would make one with it are not in the archive"


@dataclass(slots=True)
class Rekeyed:
    """Groups of rows, and the keys of the pages they make: see `Units`.

    Attributes
    ----------
    rows : list of list of int
    keys, parents, refused : list
    used : set of int
        Rows that are in a group.
    """

    rows: list[list[int]] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    parents: list[bytes | None] = field(default_factory=list)
    refused: list[tuple[bytes, str]] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    def grow(self, row: int, before: _Place, tokens: NDArray[np.uint32], page_tokens: int) -> _Place:
        """Take one page further along its chain; enter the new pages that it completes."""
        rows, parts = [*before.rows, row], [*before.tokens, tokens]
        if sum(map(len, parts)) < page_tokens:
            return _Place(before.last, before.root, rows, parts)
        fresh = chain_keys(before.last, np.concatenate(parts), page_tokens)
        chain = [None if before.last == before.root else before.last, *fresh]
        self.rows.append(rows)
        self.keys += fresh
        self.parents += chain[:-1]
        self.used.update(rows)
        return _Place(fresh[-1], before.root, [], [])


@dataclass(slots=True)
class _Place:
    """Where a chain has got to: the last new key, the root it began with, rows that no new page ends yet."""

    last: bytes
    root: bytes
    rows: list[int]
    tokens: list[NDArray[np.uint32]]


def rekey(part: ArchivePart, page_tokens: int, identity: dict[str, Any], tenants: Sequence[str]) -> Rekeyed:
    """Follow the chains of a part from their roots and compute keys for pages of `page_tokens` tokens.

    Every page's own key is computed from its tokens first: where that is not the key it has, or the page
    before it is missing, nothing is known of the keys that follow. Memory is that of the part's index.
    """
    found = Rekeyed()
    rows = np.concatenate([rows for _, rows in part.chunks()])
    keys = keys_of(rows)
    if not part.facts.has_tokens:
        found.refused = [(key, NO_TOKENS) for key in keys]
        return found
    tokens = part.token_ids(np.arange(len(rows)))
    known = tokens[:, 0] != NO_TOKEN
    found.refused += [(keys[row], NO_TOKENS) for row in np.flatnonzero(~known).tolist()]
    children: dict[int, list[int]] = {}
    for row in np.flatnonzero(known).tolist():
        children.setdefault(int(rows["parent"][row]), []).append(row)
    roots = list(chain_roots(identity, tenants))
    todo: list[tuple[int, _Place]] = []
    for row in children.get(0, ()):
        for root in roots:
            if _key(root, tokens[row]) == keys[row]:
                todo.append((row, _Place(root, root, [], [])))
                break
    reached: set[int] = set()
    while todo:
        row, before = todo.pop()
        reached.add(row)
        after = found.grow(row, before, tokens[row], page_tokens)
        todo += [
            (child, after)
            for child in children.get(key_head(keys[row]), ())
            if child not in reached and _key(keys[row], tokens[child]) == keys[child]
        ]
    for row in np.flatnonzero(known).tolist():
        if row not in reached:
            found.refused.append((keys[row], NO_CHAIN))
        elif row not in found.used:
            found.refused.append((keys[row], NO_GROUP))
    return found


def _key(parent: bytes, tokens: NDArray[np.uint32]) -> bytes:
    return sha256(parent + tokens.astype("<u4", copy=False).tobytes()).digest()
