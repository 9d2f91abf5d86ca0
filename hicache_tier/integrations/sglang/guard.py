"""Methods that SGLang calls on threads of its own, where nothing may raise."""

from __future__ import annotations

import logging
import os
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from .desk import Desk
    from .tally import Tally

_LOG = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Adapter(Protocol):
    """What has such methods."""

    desk: Desk
    tally: Tally


_A = TypeVar("_A", bound=Adapter)


def guarded(
    op: str, otherwise: Callable[..., _T]
) -> Callable[[Callable[Concatenate[_A, _P], _T]], Callable[Concatenate[_A, _P], _T]]:
    """Have a method answer `otherwise(...)` where it raises, which is counted under `op`.

    So it does in a child of fork, which has none of the threads, and whose locks may be held for ever.
    """

    def decorate(method: Callable[Concatenate[_A, _P], _T]) -> Callable[Concatenate[_A, _P], _T]:
        @wraps(method)
        def call(self: _A, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            if os.getpid() == self.desk.pid:
                try:
                    return method(self, *args, **kwargs)
                except Exception:  # noqa: BLE001 - a fault of ours is a miss there, whatever it is
                    _LOG.exception("%s failed", method.__name__)
                    self.tally.refused(op, "kv", "error", 1)
            return otherwise(*args, **kwargs)

        return call

    return decorate


def none_of(keys: object = None, *_: object, **__: object) -> list[Any]:
    """Answer False for each key."""
    return [False] * len(keys) if isinstance(keys, list | tuple) else []


def nothing(*_: object, **__: object) -> None:
    """Answer None."""
