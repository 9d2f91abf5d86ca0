"""The order of axes as archives name it, and back."""

from __future__ import annotations

from hicache_tier.errors import StoreError
from hicache_tier.layout import Layout


def layout_of(axis_order: object) -> Layout:
    """Return a layout that stores pages in this order of axes.

    Raises
    ------
    StoreError
        Where there is none.
    """
    for layout in Layout:
        if layout.page_axes == axis_order:
            return layout
    known = ", ".join(sorted({layout.page_axes for layout in Layout}))
    raise StoreError(f"axis order {axis_order!r} is not known. Known: {known}.")
