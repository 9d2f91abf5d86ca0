"""Engines and stores that faults befall."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from hicache_tier.errors import InvalidArgumentError

from .call import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_tier_storage import ByteEngine, PageBatch

    from .call import Segments
    from .fault import Fault

_KEYED = ("match_prefix", "contains", "touch", "delete", "pin", "unpin")


class _Wrapped:
    """What both have: faults around calls, the first named outermost; all else is the inner one's."""

    def __init__(self, inner: Any, faults: tuple[Fault, ...]) -> None:  # noqa: ANN401 - engine or store
        self.inner = inner
        self.faults = faults
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def _call(self, verb: str, count: int, facts: dict[str, Any], go: Callable[[], Any]) -> Any:  # noqa: ANN401
        with self._lock:
            self.calls[verb] += 1
            call = Call(verb, self.calls[verb], count, **facts)
        for fault in reversed(self.faults):
            go = partial(fault.around, call, go)
        return go()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the inner one has
        return getattr(self.inner, name)


class FaultyEngine(_Wrapped):
    """A byte engine that faults befall.

    Parameters
    ----------
    inner : ByteEngine
        Any.
    *faults : Fault
        The first is met first.

    Attributes
    ----------
    calls : Counter of str
        By verb.
    """

    def __init__(self, inner: ByteEngine, *faults: Fault) -> None:
        super().__init__(inner, faults)

    @property
    def name(self) -> str:
        """The inner engine's, and that it is wrapped."""
        return f"faulty-{self.inner.name}"

    @property
    def mode(self) -> str:
        """The inner engine's."""
        return str(self.inner.mode)

    def write(self, batch: PageBatch) -> list[str]:
        """Write pages, as far as the faults let it."""
        return self._move("write", batch, self.inner.write)

    def read(self, batch: PageBatch) -> list[str]:
        """Read pages, as far as the faults let it."""
        return self._move("read", batch, self.inner.read)

    def close(self) -> None:
        """Close the inner engine."""
        self.inner.close()

    def _move(self, verb: str, batch: PageBatch, move: Callable[[PageBatch], list[str]]) -> list[str]:
        def locate() -> list[Segments]:
            lengths = batch.nbytes.tolist()
            return [list(zip(row, lengths, strict=True)) for row in batch.addresses.tolist()]

        facts = {"batch": batch, "locate": locate}
        return self._call(verb, len(batch), facts, partial(move, batch))  # type: ignore[no-any-return]


class FaultyStore(_Wrapped):
    """A page store that faults befall.

    Parameters
    ----------
    inner : PageStore
        Any with `put`, `get` and `match_prefix`.
    *faults : Fault
        The first is met first.

    Raises
    ------
    InvalidArgumentError
        For a fault that needs files: it is an engine's.
    """

    def __init__(self, inner: Any, *faults: Fault) -> None:  # noqa: ANN401 - anybody's store
        for fault in faults:
            if fault.needs_file:
                raise InvalidArgumentError(
                    f"{type(fault).__name__} changes files, and a store's calls name none. "
                    "Give the store a FaultyEngine with it."
                )
        super().__init__(inner, faults)

    def put(self, keys: Any, host: Any, pages: Any, **options: Any) -> Any:  # noqa: ANN401 - as the store's
        """Store pages, as far as the faults let it."""
        return self._move("put", keys, host, pages, options)

    def get(self, keys: Any, host: Any, pages: Any, **options: Any) -> Any:  # noqa: ANN401 - as the store's
        """Load pages, as far as the faults let it."""
        return self._move("get", keys, host, pages, options)

    def _move(self, verb: str, keys: Any, host: Any, pages: Any, options: dict[str, Any]) -> Any:  # noqa: ANN401
        facts = {"batch": None, "locate": lambda: host.segments(pages)}
        go = partial(getattr(self.inner, verb), keys, host, pages, **options)
        return self._call(verb, len(keys), facts, go)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the inner one has
        found = super().__getattr__(name)
        if name not in _KEYED:
            return found
        return lambda keys, **options: self._call(
            name, len(keys), {"batch": None, "locate": list}, partial(found, keys, **options)
        )
