"""What a tier needs of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.host_pool import HostPool
    from hicache_tier.layout import Layout


class StoreLike(Protocol):
    """The part of `PageStore` that a tier calls, from its own threads, several at a time.

    `put` and `get` answer with one status a page, true where the page was stored (or was there already) or
    loaded, with a text `reason` where not. Calls may fail or hang: the tier counts and bounds that.

    A store that evicts pages should also have `touch(keys)` and `contains(keys)`, both cheap, both answering
    with one truth value a key, whether its page is there. `touch` makes pages as recent as a read would: the
    tier calls it for stored pages that are used in the host tier, which the store would else take for unused.
    `contains` is asked at `flush` and `close`, for all stored pages in the host tier.

    One that makes its calls on threads of its own, to bound them, should have `on_this_thread`: the same
    store without that, which the tier calls instead.
    """

    @property
    def geometry(self) -> KVGeometry:
        """What a stored page holds."""

    @property
    def layout(self) -> Layout:
        """The order of its axes."""

    def put(
        self,
        keys: Sequence[bytes],
        host: HostPool,
        pages: torch.Tensor,
        *,
        parents: Sequence[bytes | None] | None = None,
    ) -> Sequence[object]:
        """Write host pages under their keys."""

    def get(self, keys: Sequence[bytes], host: HostPool, pages: torch.Tensor) -> Sequence[object]:
        """Read the pages of keys into host pages."""

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """Count the consecutive keys present, from the start."""


def optional_call(store: StoreLike, name: str) -> Callable[[Sequence[bytes]], object] | None:
    """Return a method that a store may have or not."""
    call = getattr(store, name, None)
    return call if callable(call) else None


def truths(answer: object, count: int) -> list[bool]:
    """Turn an answer into one truth value a key.

    Raises
    ------
    ValueError
        Where it is not one a key.
    """
    values = [bool(value) for value in answer]  # type: ignore[attr-defined]
    if len(values) != count:
        raise ValueError(f"the store answered {len(values)} values for {count} keys")
    return values


def failure_reasons(statuses: object, count: int) -> list[str | None]:
    """Turn a store's statuses into one reason a page, None where it went well.

    Raises
    ------
    ValueError
        Where the answer is not one status a page: then nothing is known about any page.
    """
    verdicts = list(statuses)  # type: ignore[call-overload]
    if len(verdicts) != count:
        raise ValueError(f"the store answered {len(verdicts)} statuses for {count} pages")
    return [None if verdict else _reason(verdict) for verdict in verdicts]


def _reason(status: object) -> str:
    """Return the word of a reason without its details, so that counters stay few."""
    return str(getattr(status, "reason", None) or "refused").split(":", 1)[0].strip()


def error_kind(error: BaseException) -> str:
    """Return the word that counters use for an exception: its `kind`, else the name of its class."""
    return str(getattr(error, "kind", None) or type(error).__name__)
