"""Which memory of devices is registered with an engine: once an owner, undone when the owner goes."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from .engine import DeviceMemory

_LOG = logging.getLogger(__name__)
Token = TypeVar("Token")


class Registrations(Generic[Token]):
    """Registered memory.

    Parameters
    ----------
    register : callable
        Registers memory; returns what undoes it. May raise.
    undo : callable
        Takes what `register` returned. What it raises is logged.
    """

    def __init__(self, register: Callable[[DeviceMemory], Token], undo: Callable[[Token], object]) -> None:
        self._register, self._undo = register, undo
        self._lock = threading.RLock()  # an owner may go while this thread registers another
        self._known: dict[int, tuple[Token, weakref.finalize[[int], object]]] = {}

    def cover(self, memory: DeviceMemory) -> None:
        """Have memory registered; raises what `register` raises."""
        key = id(memory.owner)
        with self._lock:
            if key in self._known:
                return
            token = self._register(memory)
            end = weakref.finalize(memory.owner, self._drop, key)
            end.atexit = False  # the process gives all back by itself
            self._known[key] = (token, end)

    def close(self) -> None:
        """Undo all."""
        with self._lock:
            for key in list(self._known):
                self._drop(key)

    def leak(self) -> None:
        """Forget all and undo nothing."""
        with self._lock:
            for _, end in self._known.values():
                end.detach()
            self._known.clear()

    def _drop(self, key: int) -> None:
        with self._lock:
            found = self._known.pop(key, None)
            if found is None:
                return
            token, end = found
            end.detach()
            try:
                self._undo(token)
            except Exception:  # noqa: BLE001 - packages do not name what they raise
                _LOG.warning("memory of a device was not deregistered", exc_info=True)
