"""Errors, grouped by what a handler would do.

Every error of this package derives from `HiCacheTierError` and carries a `kind`: a short stable word that
counters and handlers may match on. Kinds are only ever added. Each class also derives from the builtin that
code without knowledge of this package would catch.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class HiCacheTierError(Exception):
    """Base of all errors of this package."""

    kind: ClassVar[str] = "error"


class InvalidArgumentError(HiCacheTierError, ValueError):
    """An argument is wrong; nothing was touched. The message names what is allowed."""

    kind = "invalid_argument"


def not_known(noun: str, value: object, allowed: Sequence[str], near: str = "") -> InvalidArgumentError:
    """Return the error for a name that is not one of `allowed`; it suggests the one nearest to `near`."""
    close = difflib.get_close_matches(near or str(value), allowed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return InvalidArgumentError(f"{noun} {value!r} is not known.{hint} Allowed: {', '.join(allowed)}.")


def how_to_get(extra: str) -> str:
    """Return what to type for an optional part of this project that is not installed."""
    return f"pip install 'hicache-tier[{extra}]', or in a clone pip install '.[{extra}]'"


class UnsupportedTransferError(HiCacheTierError, ValueError):
    """The path table refuses this combination.

    Attributes
    ----------
    layout, io_backend : str
        What was asked for.
    sharded : bool
        Whether the device pool is layer-sharded.
    alternatives : tuple[str, ...]
        What works instead, readable by a person, best first.
    """

    kind = "unsupported_transfer"

    def __init__(
        self,
        message: str,
        *,
        layout: str,
        io_backend: str,
        sharded: bool,
        alternatives: tuple[str, ...] = (),
    ) -> None:
        hint = f". Use instead: {'; '.join(alternatives)}." if alternatives else "."
        super().__init__(message + hint)
        self.layout = layout
        self.io_backend = io_backend
        self.sharded = sharded
        self.alternatives = alternatives


class MemoryBudgetError(HiCacheTierError, MemoryError):
    """A pool would not fit the host or its cgroup; no memory was touched."""

    kind = "memory_budget"


class DoubleFreeError(HiCacheTierError, ValueError):
    """A page was freed that is not allocated; the message names both owners."""

    kind = "double_free"


class ClosedError(HiCacheTierError, RuntimeError):
    """The pool, store or tier was closed."""

    kind = "closed"


class StoreError(HiCacheTierError, OSError):
    """A store cannot be opened or created as asked; nothing in it was changed."""

    kind = "store"


class NotAStoreError(StoreError):
    """The directory holds something else than a store."""

    kind = "not_a_store"


class FormatVersionError(StoreError):
    """The store was written in a later version of the format."""

    kind = "format_version"


class EncryptionError(StoreError):
    """A store is encrypted and the key is missing or another one, or what encrypts is not installed."""

    kind = "encryption"


class StoreFullError(StoreError):
    """There is no room for even one page within the capacity or on the disk."""

    kind = "store_full"


class EngineUnavailableError(HiCacheTierError, RuntimeError):
    """An engine was insisted on that cannot run here; the message says why."""

    kind = "engine_unavailable"
