"""Prefix chains of stored pages, from the first 8 bytes of keys and of parents' keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Chains:
    """Where pages stand in their chains.

    Attributes
    ----------
    depth : int64 [n]
        Pages from the root of the chain down to this one, itself included; 0 where a page on the way is
        missing, so that no lookup of a prefix gets here.
    root, leaf : bool [n]
        Whether a chain starts here, and whether no stored page continues this one.
    """

    depth: NDArray[np.int64]
    root: NDArray[np.bool_]
    leaf: NDArray[np.bool_]

    @classmethod
    def build(cls, heads: NDArray[np.uint64], parents: NDArray[np.uint64]) -> Chains:
        """Follow parents by pointer doubling: about `log2(longest chain)` passes over the pages.

        Pages whose keys share their first 8 bytes count as one page (a root, if one of them is); pages that
        name each other in a circle have depth 0.

        Parameters
        ----------
        heads, parents : uint64 [n]
            First 8 bytes of each page's key and of its parent's key (0 at a root).
        """
        count = len(heads)
        if not count:
            none = np.zeros(0, np.bool_)
            return cls(np.zeros(0, np.int64), none, none)
        order = np.lexsort((parents, heads))
        nodes, first, inverse = np.unique(heads[order], return_index=True, return_inverse=True)
        of_page = np.empty(count, np.int64)
        of_page[order] = inverse
        above = parents[order][first]
        at = np.minimum(np.searchsorted(nodes, above), len(nodes) - 1)
        root = above == 0
        held = (nodes[at] == above) & ~root
        leaf = np.ones(len(nodes), np.bool_)
        leaf[at[held]] = False
        depth = _depths(root, held, at)
        return cls(depth[of_page], root[of_page], leaf[of_page])

    def summary(self, chosen: NDArray[np.bool_]) -> dict[str, int]:
        """Count among the chosen pages: `roots`, `leaves`, `longest` and `orphans` (depth 0)."""
        return {
            "roots": int((self.root & chosen).sum()),
            "leaves": int((self.leaf & chosen).sum()),
            "longest": int(self.depth[chosen].max(initial=0)),
            "orphans": int(((self.depth == 0) & chosen).sum()),
        }


def _depths(root: NDArray[np.bool_], held: NDArray[np.bool_], above: NDArray[np.intp]) -> NDArray[np.int64]:
    count = len(root)
    top, lost = count, count + 1  # two more nodes, which point to themselves
    jump = np.append(np.where(root, top, np.where(held, above, lost)), [top, lost])
    steps = np.append(np.ones(count, np.int64), [0, 0])
    for _ in range(count.bit_length() + 1):
        if (jump[:count] >= count).all():
            break
        steps += steps[jump]
        jump = jump[jump]
    return np.where(jump[:count] == top, steps[:count], 0)
