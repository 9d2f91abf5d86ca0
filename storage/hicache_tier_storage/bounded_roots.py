"""Several directories as one store whose every call ends by a deadline, each root's part of it by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from .abandoned import abandonable, own_copy
from .bounded import BoundedStore
from .keys import PageKey, normalise_keys
from .payloads import payload_of
from .putter import Offer
from .roots import SeveralRoots, all_answers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike

    from .closing import CloseReport
    from .payload import Pool
    from .pending import Pending
    from .status import PageStatus
    from .store import PageStore


class BoundedRoots(SeveralRoots):
    """A store on several roots, of which one that hangs costs its own pages and nothing else.

    Every root's part of a call is a call of a `BoundedStore`: pages of a root that is late are `timeout`,
    those of the others have their own verdicts.

    Parameters
    ----------
    inner : SeveralRoots
    deadline_s : float

    Attributes
    ----------
    on_this_thread : SeveralRoots
        The store without deadlines, for those who make its calls on threads of their own.
    """

    def __init__(self, inner: SeveralRoots, deadline_s: float) -> None:
        self.on_this_thread = inner
        self._bounded = [BoundedStore(one, deadline_s) for one in inner.stores.values()]
        super().__init__(dict(zip(inner.roots, self._bounded, strict=True)), inner.left_out)

    def put(
        self,
        keys: Sequence[PageKey],
        host: Pool,
        pages: ArrayLike,
        *,
        parents: Sequence[PageKey | None] | None = None,
        pin: bool = False,
    ) -> list[PageStatus]:
        """See `PageStore.put`."""
        names, numbers = normalise_keys(keys), own_copy(pages)
        offer = Offer.of(names, parents, payload_of(host, numbers, len(names), self.geometry, self.layout))

        def begin(one: BoundedStore, rows: list[int]) -> Pending:
            inner, memory = one.on_this_thread, abandonable(host, numbers[rows], write=True)

            def store() -> list[PageStatus]:
                payload = inner._payload(memory.pool, memory.pages, len(rows))  # noqa: SLF001 - as `SeveralRoots`
                with payload.in_use():
                    return inner._store(replace(offer.take(rows), payload=payload), pin=pin)  # noqa: SLF001

            return one.begin("put", len(rows), store, memory)

        return self._begin_on_all(names, begin)

    def get(self, keys: Sequence[PageKey], host: Pool, pages: ArrayLike) -> list[PageStatus]:
        """See `PageStore.get`."""
        names, numbers = normalise_keys(keys), own_copy(pages)
        payload_of(host, numbers, len(names), self.geometry, self.layout, unique=True)

        def begin(one: BoundedStore, rows: list[int]) -> Pending:
            memory = abandonable(host, numbers[rows], write=False)
            get = partial(one.on_this_thread.get, [names[row] for row in rows], memory.pool, memory.pages)
            return one.begin("get", len(rows), get, memory)

        return self._begin_on_all(names, begin)

    def clear(self) -> int:
        """See `PageStore.clear`.

        Raises
        ------
        DeadlineError
            Where a root hangs; its pages may yet go, those of the others have gone.
        """
        begun = [one.begin_clear() for one in self._bounded]
        return sum(all_answers([one.answer for one in begun]))

    def close(self, timeout: float = 10.0) -> CloseReport:
        """See `PageStore.close`."""
        report = super().close(timeout)
        self.on_this_thread.end_threads()
        return report

    def _on_all(
        self, names: list[bytes], work: Callable[[PageStore, list[int]], list[PageStatus]]
    ) -> list[PageStatus]:
        """Let every root do its rows, without pages of the caller's."""

        def begin(one: BoundedStore, rows: list[int]) -> Pending:
            return one.begin("call", len(rows), partial(work, one.on_this_thread, rows))

        return self._begin_on_all(names, begin)

    def _begin_on_all(
        self, names: list[bytes], begin: Callable[[BoundedStore, list[int]], Pending]
    ) -> list[PageStatus]:
        """Begin every root's part, then wait for them; all are left where that is interrupted."""
        parts = [(one, rows) for one, rows in zip(self._bounded, self._places(names), strict=True) if rows]
        begun: list[Pending] = []
        try:
            for one, rows in parts:
                begun.append(begin(one, rows))
            return self._verdicts(len(names), parts, [call.answer for call in begun])
        finally:
            for call in begun:
                call.leave()
