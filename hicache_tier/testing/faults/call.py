"""One call of an engine or of a store, as faults see it."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_tier_storage import PageBatch

    Segments: TypeAlias = list[tuple[int, int]]
    When: TypeAlias = Callable[["Call"], bool]


@dataclass(frozen=True, slots=True)
class Failed:
    """A verdict that is false, and why."""

    reason: str
    ok: bool = False

    @property
    def kind(self) -> str:
        """The reason without its detail."""
        return self.reason.partition(":")[0]

    def __bool__(self) -> bool:
        return self.ok


@dataclass(slots=True, eq=False)
class Call:
    """What was called, and with what.

    Attributes
    ----------
    verb : str
        `read` or `write` of an engine; `get`, `put`, `match_prefix`, ... of a store.
    number : int
        Calls of that verb so far, this one included.
    count : int
        Pages.
    batch : PageBatch or None
        Of an engine's call.
    locate : callable
        Returns the same as `segments`; called when it is asked for.
    """

    verb: str
    number: int
    count: int
    batch: PageBatch | None
    locate: Callable[[], Sequence[Segments]]

    @property
    def segments(self) -> Sequence[Segments]:
        """Address and length of each piece of memory of each page."""
        return self.locate()

    @contextmanager
    def writable(self) -> Iterator[bool]:
        """Say whether the memory may be written to: a caller may have left, and taken its pages with it."""
        lease = getattr(self.batch, "lease", None)
        entered = lease is None or lease.enter()
        try:
            yield entered
        finally:
            if lease is not None and entered:
                lease.leave()

    @property
    def moves(self) -> str:
        """`in` where pages come to memory, `out` where they go to storage, else ""."""
        return {"read": "in", "get": "in", "write": "out", "put": "out"}.get(self.verb, "")

    def verdict(self, reason: str) -> Any:  # noqa: ANN401 - engines and stores differ
        """Return what says that a page failed."""
        return reason if self.batch is not None else Failed(reason)

    def good(self, verdict: Any) -> bool:  # noqa: ANN401 - engines and stores differ
        """Whether a verdict says that a page was moved."""
        return not verdict if self.batch is not None else bool(verdict)


def load(segments: Segments) -> bytes:
    """Return the bytes of a page."""
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in segments)


def store(segments: Segments, data: bytes, first: int = 0) -> None:
    """Write bytes to a page, from its byte `first` on."""
    at, end = 0, first + len(data)
    for address, nbytes in segments:
        start, stop = max(first, at), min(end, at + nbytes)
        if start < stop:
            ctypes.memmove(address + start - at, data[start - first : stop - first], stop - start)
        at += nbytes


# -- which calls -------------------------------------------------------------------------------------------


def always(call: Call) -> bool:
    """Say yes to every call that moves pages."""
    return bool(call.moves)


def coming_in(call: Call) -> bool:
    """Say yes to reads of an engine, gets of a store."""
    return call.moves == "in"


def going_out(call: Call) -> bool:
    """Say yes to writes of an engine, puts of a store."""
    return call.moves == "out"


def verbs(*names: str) -> When:
    """Name calls."""
    return lambda call: call.verb in names


def on_call(*numbers: int, when: When = always) -> When:
    """Name the k-th call of its verb, counted from 1."""
    return lambda call: call.number in numbers and when(call)


def every(step: int, when: When = always) -> When:
    """Name one call in `step`: the last of each so many."""
    return lambda call: call.number % step == 0 and when(call)
