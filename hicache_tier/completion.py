"""How far a transfer has come."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from .errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from hicache_tier_kernels import Prepared

    from .paths import Path

_POLL_S = 20e-6


class Completion:
    """A transfer that has finished by the time it is returned: what the reference engine gives.

    Pages of both pools belong to the transfer until `done()`: neither free nor write them before.

    Attributes
    ----------
    path : Path
        The way the transfer took, with the reason.
    layers : tuple[int, ...]
        Global numbers of the layers that move.
    pages : int
    nbytes : int
        Bytes that move.
    """

    def __init__(self, path: Path, layers: tuple[int, ...], pages: int, nbytes: int) -> None:
        self.path = path
        self.layers = layers
        self.pages = pages
        self.nbytes = nbytes

    def done(self) -> bool:
        """Return whether the transfer is over; `wait` then raises at once where it failed."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Block until all bytes have arrived; raises `TimeoutError` after `timeout` seconds."""

    def wait_layer(self, layer: int, timeout: float | None = None) -> None:  # noqa: ARG002 - see `wait`
        """Block until the bytes of one layer (global number) have arrived."""
        self._check_layer(layer)

    def wait_on(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let a stream (the current one where left out) wait for all bytes; the host goes on."""

    def wait_layer_on(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:  # noqa: ARG002
        """Let a stream wait for one layer."""
        self._check_layer(layer)

    def _check_layer(self, layer: int) -> None:
        if layer not in self.layers:
            raise InvalidArgumentError(f"layer {layer!r} is not part of this transfer of {self.layers}.")

    def __repr__(self) -> str:
        state = "done" if self.done() else "under way"
        return f"Completion({self.path.op} of {self.pages} pages by {self.path.engine}, {state})"


class StreamCompletion(Completion):
    """A transfer on streams of its own.

    `wait_on` and `wait_layer_on` may block the host for the time that the submission takes (some 100
    microseconds a layer at most), never for the device. What goes wrong after the call that started the
    transfer is raised by all of the waits.
    """

    def __init__(
        self,
        path: Path,
        layers: tuple[int, ...],
        pages: int,
        nbytes: int,
        release: Callable[[], object],
    ) -> None:
        super().__init__(path, layers, pages, nbytes)
        self._changed = threading.Condition()
        self._waiters = 0
        self._arrivals: dict[int, torch.cuda.Event] = {}
        self._last: torch.cuda.Event | None = None
        self._prepared: Prepared | None = None
        self._error: BaseException | None = None
        self._release: Callable[[], object] | None = release

    def done(self) -> bool:
        """Return whether the transfer is over; `wait` then raises at once where it failed."""
        if self._last is None:
            if self._error is None:
                return False
        elif not _over(self._last):
            return False
        self.finish()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Block until all bytes have arrived; raises `TimeoutError` after `timeout` seconds."""
        self._wait_for(lambda: self._last, timeout)
        self.finish()
        self._raise()

    def wait_layer(self, layer: int, timeout: float | None = None) -> None:
        """Block until the bytes of one layer (global number) have arrived."""
        self._check_layer(layer)
        self._wait_for(lambda: self._arrivals.get(layer), timeout)
        with self._changed:
            if self._prepared is not None and self._error is None:
                self._error = self._prepared.fault()
        self._raise()

    def wait_on(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let a stream (the current one where left out) wait for all bytes; the host goes on."""
        self._submitted(lambda: self._last, None).wait(stream)

    def wait_layer_on(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Let a stream wait for one layer."""
        self._check_layer(layer)
        self._submitted(lambda: self._arrivals.get(layer), None).wait(stream)

    def arrive(self, layers: Iterable[int], event: torch.cuda.Event) -> None:
        """Take note of the event after which some layers are there."""
        for layer in layers:
            self._arrivals[layer] = event
        if self._waiters:  # who starts to wait now looks at the arrivals first
            with self._changed:
                self._changed.notify_all()

    def submitted(self, last: torch.cuda.Event, prepared: Prepared) -> None:
        """Take note that all is submitted, and of an event that comes after everything."""
        with self._changed:
            self._last, self._prepared = last, prepared
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Take note that submitting failed, and that nothing of it runs any more."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self.finish()

    def finish(self) -> None:
        """Give back what the transfer held; called when it is over, by whoever sees it first."""
        with self._changed:
            prepared, release = self._prepared, self._release
            self._prepared = self._release = None
            if prepared is not None and self._error is None:
                self._error = prepared.fault()
            self._changed.notify_all()
        if release is not None:
            release()

    def _submitted(
        self, event: Callable[[], torch.cuda.Event | None], timeout: float | None
    ) -> torch.cuda.Event:
        with self._changed:
            self._waiters += 1
            try:
                self._changed.wait_for(lambda: event() is not None or self._error is not None, timeout)
            finally:
                self._waiters -= 1
            self._raise()
            found = event()
        if found is None:
            raise TimeoutError(f"{self!r}: not submitted after {timeout} s")
        return found

    def _wait_for(self, event: Callable[[], torch.cuda.Event | None], timeout: float | None) -> None:
        started = time.monotonic()
        found = self._submitted(event, timeout)
        if timeout is None:
            found.synchronize()
            return
        while not _over(found):
            if time.monotonic() - started > timeout:
                raise TimeoutError(f"{self!r}: still under way after {timeout} s")
            time.sleep(_POLL_S)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _over(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
