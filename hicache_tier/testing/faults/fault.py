"""Faults of storage: each a value that changes how a call goes, to be put together at will."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

from .call import Call, always, coming_in, going_out, load, store
from .gate import Gate

if TYPE_CHECKING:
    from collections.abc import Callable

    from .call import Segments, When


class Fault:
    """What befalls some calls.

    Parameters
    ----------
    when : callable
        Told a `Call`, says whether it is one of them: `always`, `coming_in`, `going_out`, `verbs(...)`,
        `on_call(k)`, `every(n)`, or a function of your own.

    Attributes
    ----------
    on : bool
        Whether anything befalls at all; may be changed at any time.
    struck : int
        Calls that it has befallen.
    needs_file : bool
        Whether it looks at the files of an engine's batch, which a store does not have.
    """

    needs_file = False

    def __init__(self, when: When = always) -> None:
        self.on = True
        self.struck = 0
        self._when = when

    def around(self, call: Call, go: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the call returns
        """Make the call; by this, or not at all, or something else besides."""
        if not self.on or not self._when(call):
            return go()
        self.struck += 1
        return self.strike(call, go)

    def strike(self, call: Call, go: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the call returns
        """Have it happen."""
        raise NotImplementedError


class Delay(Fault):
    """Each call takes so many seconds longer."""

    def __init__(self, seconds: float, when: When = always) -> None:
        super().__init__(when)
        self.seconds = seconds

    def strike(self, call: Call, go: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Wait, then call."""
        del call
        time.sleep(self.seconds)
        return go()


class Hang(Fault):
    """Calls wait at a gate, before their bytes move or after.

    Attributes
    ----------
    gate : Gate
        `wait_for` it to hold a call, then `open` it.
    """

    def __init__(self, when: When = always, *, after: bool = False, gate: Gate | None = None) -> None:
        super().__init__(when)
        self.gate = gate or Gate()
        self._after = after

    def strike(self, call: Call, go: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Wait before or after the call."""
        del call
        if not self._after:
            self.gate()
            return go()
        answer = go()
        self.gate()
        return answer


class Fail(Fault):
    """Calls fail, without a byte moved.

    Parameters
    ----------
    how : str or BaseException
        The reason of every page, or what is raised.
    when : callable
    """

    def __init__(self, how: str | BaseException, when: When = always) -> None:
        super().__init__(when)
        self._how = how

    def strike(self, call: Call, go: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Fail."""
        del go
        if isinstance(self._how, BaseException):
            raise self._how
        return [call.verdict(self._how)] * call.count


class FailPages(Fault):
    """Some pages of a call are said to have failed, whatever became of their bytes.

    Parameters
    ----------
    reason : str
    share : float
        Of all pages.
    """

    def __init__(self, reason: str, share: float = 0.5, when: When = always, *, seed: int = 0) -> None:
        super().__init__(when)
        self._reason, self._share = reason, share
        self._random = random.Random(seed)

    def strike(self, call: Call, go: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Call, and change some verdicts."""
        bad = call.verdict(self._reason)
        return [bad if self._random.random() < self._share else verdict for verdict in go()]


class ForgetVerdicts(Fault):
    """Calls return fewer verdicts than pages: the contract itself is broken."""

    def __init__(self, count: int = 1, when: When = always) -> None:
        super().__init__(when)
        self._count = count

    def strike(self, call: Call, go: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Call, and leave verdicts out."""
        del call
        return list(go())[: -self._count]


class FlipBits(Fault):
    """One bit of some pages is another when they come in, as if it had been so on the medium.

    Parameters
    ----------
    share : float
        Of all pages.

    Attributes
    ----------
    flipped : int
        Pages.
    """

    def __init__(self, share: float = 1.0, when: When = coming_in, *, seed: int = 0) -> None:
        super().__init__(when)
        self.flipped = 0
        self._share = share
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def strike(self, call: Call, go: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Flip bits before whoever called sees the pages, and before their checksums are computed."""
        batch = call.batch
        if batch is None or batch.hook is None:
            answer = go()
            with call.writable() as writable:
                if writable:
                    self._flip(call, 0, call.count)
            return answer
        hook = batch.hook

        def flipping(first: int, last: int) -> None:
            self._flip(call, first, last)
            hook(first, last)

        batch.hook = flipping
        try:
            return go()
        finally:
            batch.hook = hook

    def _flip(self, call: Call, first: int, last: int) -> None:
        pages = call.segments[first:last]
        with self._lock:
            for segments in pages:
                if self._random.random() < self._share:
                    _flip(segments, self._random)
                    self.flipped += 1


class ReturnShort(Fault):
    """Only the first bytes of each page come in, and the engine or store says so.

    Parameters
    ----------
    nbytes : int
        That come; the rest of the page holds noise.
    """

    def __init__(self, nbytes: int, when: When = coming_in) -> None:
        super().__init__(when)
        self._nbytes = nbytes

    def strike(self, call: Call, go: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Call, and spoil what would not have come."""
        go()
        with call.writable() as writable:
            for segments in call.segments if writable else ():
                rest = sum(nbytes for _, nbytes in segments) - self._nbytes
                store(segments, b"\xc3" * max(0, rest), self._nbytes)
        return [call.verdict(f"io_error: {self._nbytes} bytes came")] * call.count


class OutOfSpace(Fault):
    """There is room for so many more pages, then none.

    Attributes
    ----------
    room : int
        Pages that may yet be written; may be changed at any time.
    """

    def __init__(self, room: int = 0, when: When = going_out, *, reason: str = "disk_full") -> None:
        super().__init__(when)
        self.room = room
        self._reason = reason
        self._lock = threading.Lock()

    def strike(self, call: Call, go: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Call, and refuse what there is no room for."""
        with self._lock:
            fits = min(self.room, call.count)
            self.room -= fits
        answer = list(go()) if fits else []
        return answer[:fits] + [call.verdict(self._reason)] * (call.count - fits)


def _flip(segments: Segments, rng: random.Random) -> None:
    data = load(segments)
    at = rng.randrange(len(data))
    store(segments, bytes([data[at] ^ 1 << rng.randrange(8)]), at)
