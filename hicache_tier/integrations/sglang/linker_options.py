"""What an operator may write into `linker_extra_config`: the storage plug-in's options, and the layout."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from hicache_tier.errors import not_known
from hicache_tier.layout import Layout

from .options import Options

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class LinkerOptions:
    """Options of the linker, checked.

    Attributes
    ----------
    common : Options
        Those that the storage plug-in has too.
    layout : Layout
        Order of axes in the store. `page_first_direct` by default, whose bytes `layer_first` shares. A store
        is shared with servers that have HiCache where it is their `--hicache-mem-layout`.
    """

    common: Options
    layout: Layout

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Self:
        """Check the extra config.

        Raises
        ------
        InvalidArgumentError
            For an option that is not known, with the nearest name, or a value that is not allowed.
        """
        options = dict(given or {})
        allowed = sorted([*(known.name for known in fields(Options)), "roots", "layout"])
        for name in options:
            if name not in allowed:
                raise not_known("option", name, allowed)
        layout = Layout.parse(options.pop("layout", Layout.PAGE_FIRST_DIRECT))
        return cls(Options.parse(options), layout)
