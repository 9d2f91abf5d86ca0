"""Opening one store in several directories at once; one that fails or hangs is left out."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

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
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from .pending import Pending
    from .store import PageStore

_LOG = logging.getLogger(__name__)


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
        Where none of them can be opened, or one holds something else than a store or is of another key.
    """
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise InvalidArgumentError(f"roots must lie apart, got {twice} twice.")
    left_out: dict[Path, StoreError] = {}
    looks: dict[Path, Look] = {}
    with begun({path: partial(Look.at, path) for path in paths}, deadline_s, lambda _: None) as openings:
        _collect(openings, looks, left_out)
    refuse_nested(looks)
    shares = split_capacity(
        {path: looks[path].nbytes if path in looks else 0 for path in paths}, capacity_nbytes
    )
    works = {path: partial(open_root, path, shares[path]) for path in looks}
    limit_s = None if deadline_s is None else (OPENING - 1) * deadline_s
    stores: dict[Path, PageStore] = {}
    try:
        with begun(works, limit_s, lambda store: store.close()) as openings:
            _collect(openings, stores, left_out)
    except BaseException:
        for store in stores.values():
            store.close()
        raise
    if not stores:
        raise next(reversed(left_out.values()))
    opened = SeveralRoots(stores, {path: str(error) for path, error in left_out.items()})
    return opened if deadline_s is None else BoundedRoots(opened, deadline_s)


def _collect(
    openings: Mapping[Path, Pending], found: dict[Path, Any], left_out: dict[Path, StoreError]
) -> None:
    """Get the answer of every root; one that cannot be used is no fault of the others."""
    for path, opening in openings.items():
        try:
            found[path] = opening.answer()
        except (NotAStoreError, FormatVersionError, EncryptionError):
            raise
        except StoreError as error:
            _LOG.warning("%s is left out of the store: %s", path, error)
            left_out[path] = error
