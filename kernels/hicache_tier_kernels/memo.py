"""What follows from two row maps, made once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

    from .plan import RowMap

Made = TypeVar("Made")


class PairMemo(Generic[Made]):
    """Remembers what follows from two row maps for as long as both live.

    Parameters
    ----------
    make : callable
        Takes both maps; what it returns must not hold either.
    """

    def __init__(self, make: Callable[[RowMap, RowMap], Made]) -> None:
        self._make = make
        self._known: WeakKeyDictionary[RowMap, WeakKeyDictionary[RowMap, Made]] = WeakKeyDictionary()

    def __call__(self, first: RowMap, second: RowMap) -> Made:
        """Return what `make` made of the two; made twice at most where threads race."""
        inner = self._known.get(first)
        if inner is None:
            inner = self._known.setdefault(first, WeakKeyDictionary())
        try:
            return inner[second]
        except KeyError:
            return inner.setdefault(second, self._make(first, second))
