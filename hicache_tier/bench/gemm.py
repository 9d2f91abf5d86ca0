"""A matrix product repeated on a stream of its own: work that transfers must not slow down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .gpu import has_passed, new_event, new_stream, seconds_between

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 8192


class Gemm:
    """bf16 products of two random square matrices.

    Parameters
    ----------
    device : torch.device
    size : int
        Rows and columns.
    """

    def __init__(self, device: torch.device, size: int = SIZE) -> None:
        self._stream = new_stream(device)
        self._a, self._b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
        self._out = torch.empty_like(self._a)
        torch.cuda.synchronize(device)
        self._events: list[torch.cuda.Event] = []

    def start(self, count: int) -> None:
        """Submit `count` products."""
        self._events = [new_event() for _ in range(count + 1)]
        with torch.cuda.stream(self._stream):
            for event in self._events[:-1]:
                event.record(self._stream)
                torch.mm(self._a, self._b, out=self._out)
            self._events[-1].record(self._stream)

    def running(self) -> bool:
        """Return whether a product has not ended yet."""
        return not has_passed(self._events[-1])

    def covers(self, event: torch.cuda.Event) -> bool:
        """Return whether an event took place before the last product ended; both must have taken place."""
        return seconds_between(event, self._events[-1]) >= 0

    def seconds(self) -> float:
        """Wait for the end and return the mean seconds of a product, without the first and the last."""
        self._events[-1].synchronize()
        inner = self._events[1:-1]
        return seconds_between(inner[0], inner[-1]) / (len(inner) - 1)

    def products_in(self, seconds: float) -> int:
        """Return how many products, eight or more, take about so long."""
        self.start(16)
        return max(8, round(seconds / self.seconds()))


def beside(
    gemm: Gemm, count: int, submit: Callable[[], None], stream: torch.cuda.Stream
) -> tuple[float, list[float]]:
    """Repeat a transfer for as long as products run.

    Parameters
    ----------
    gemm : Gemm
    count : int
        Products.
    submit : callable
        Submits one transfer that `stream`, current while it is called, then waits for.
    stream : torch.cuda.Stream

    Returns
    -------
    float
        Mean seconds of a product.
    list of float
        Seconds of each transfer that ended before the products did.
    """
    laps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    gemm.start(count)
    with torch.cuda.stream(stream):
        while gemm.running():
            start, end = (new_event() for _ in range(2))
            start.record(stream)
            submit()
            end.record(stream)
            end.synchronize()
            laps.append((start, end))
    seconds = gemm.seconds()
    return seconds, [seconds_between(start, end) for start, end in laps if gemm.covers(end)]
