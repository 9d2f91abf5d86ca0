"""Opening one store in several directories at once; one that fails or hangs is left out."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_tier.errors import (
    EncryptionError,
    FormatVersionError,
    InvalidArgumentError,
    NotAStoreError,
    StoreError,
)

from .bounded_opening import OPENING, begun
from .bounded_roots import BoundedRoots
from .placement import Look, refuse_nested, split_capacity
from .roots import SeveralRoots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from .pending import Pending
    from .store import PageStore

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


def open_roots(
    paths: Sequence[Path],
    open_root: Callable[[Path, int | None], PageStore],
    capacity_nbytes: int | None,
    deadline_s: float | None,
) -> PageStore:
    """Open the store in every directory; leave out, with a warning, those that do not work.

    Parameters
    ----------
    paths : sequence of Path
        One at least.
    open_root : callable (path, capacity_nbytes)
    capacity_nbytes : int, optional
        Of all roots together; None: each root's own default.
    deadline_s : float, optional
        A root may take as long to say where it lies, and what is left of four times as long to be opened.
        None: they are opened one after another, and take as long as they take.

    Raises
    ------
    InvalidArgumentError
        Where one directory is or contains another.
    StoreError
        Where none of them can be opened, or one holds something else than a store or is of another key: then
        at once, whatever the others do.
    """
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise InvalidArgumentError(f"roots must lie apart, got {twice} twice.")
    left_out: dict[Path, StoreError] = {}
    with begun({path: partial(Look.at, path) for path in paths}, deadline_s, lambda _: None) as openings:
        looks: dict[Path, Look] = _in_order(paths, _collect(openings, left_out))
    refuse_nested(looks)
    shares = split_capacity(
        {path: looks[path].nbytes if path in looks else 0 for path in paths}, capacity_nbytes
    )
    works = {path: partial(open_root, path, shares[path]) for path in looks}
    limit_s = None if deadline_s is None else (OPENING - 1) * deadline_s
    with begun(works, limit_s, lambda store: store.close()) as openings:
        stores: dict[Path, PageStore] = _in_order(paths, _collect(openings, left_out))
        if not stores:
            raise left_out[paths[-1]]
        reasons = {path: str(error) for path, error in _in_order(paths, left_out).items()}
        opened = SeveralRoots(stores, reasons)
        return opened if deadline_s is None else BoundedRoots(opened, deadline_s)


def _collect(openings: Iterable[tuple[Path, Pending]], left_out: dict[Path, StoreError]) -> dict[Path, Any]:
    """Get the answer of every root as it comes; one that cannot be used is no fault of the others."""
    found: dict[Path, Any] = {}
    for path, opening in openings:
        try:
            found[path] = opening.answer()
        except (NotAStoreError, FormatVersionError, EncryptionError):
            raise
        except StoreError as error:
            _LOG.warning("%s is left out of the store: %s", path, error)
            left_out[path] = error
    return found


def _in_order(paths: Sequence[Path], found: Mapping[Path, _T]) -> dict[Path, _T]:
    """Return what was found in the order of the roots: a page's home follows from it."""
    return {path: found[path] for path in paths if path in found}
