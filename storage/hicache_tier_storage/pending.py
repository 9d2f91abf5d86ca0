"""A call that was begun and may be left when its deadline has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from .calls import Call


class Pending:
    """One call of a bounded store; `answer` waits for it, or `leave` does not.

    Parameters
    ----------
    call : Call or None
        None where it could not be begun.
    until_s : float
        Its deadline, on the monotonic clock.
    otherwise : callable
        What to answer where it was late, or could not be begun.
    abandon : callable
        Called once where the call is left before it has returned.
    """

    __slots__ = ("_abandon", "_call", "_otherwise", "_until_s")

    def __init__(
        self,
        call: Call | None,
        until_s: float,
        otherwise: Callable[[], Any],
        abandon: Callable[[Call], None],
    ) -> None:
        self._call, self._until_s = call, until_s
        self._otherwise, self._abandon = otherwise, abandon

    def answer(self) -> Any:  # noqa: ANN401 - what the call returns
        """Return what the call returned, or raise what it raised; once the deadline has come, say that."""
        call = self._call
        if call is not None:
            in_time = False
            try:
                in_time = call.wait(self._until_s)
            finally:
                if not in_time:  # or interrupted
                    self.leave()
            self._call = None
            if in_time:
                return call.outcome()
        return self._otherwise()

    def leave(self) -> None:
        """Wait no more; nothing where it was answered, or left."""
        call, self._call = self._call, None
        if call is not None:
            self._abandon(call)
