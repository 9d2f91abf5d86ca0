"""Options that a function does not have, answered as other wrong options are."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from .errors import InvalidArgumentError, not_known

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def named_options(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function raise `InvalidArgumentError`, with the nearest name, for an option it does not have.

    So for an argument that is given twice. Python's own `TypeError` names neither the nearest nor what is
    allowed, and is none of ours. Type checkers see the function as it is.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [one.name for one in parameters]
    places = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    options = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise not_known("option", name, options)
            if name in places[: len(args)]:
                raise InvalidArgumentError(f"{name} is given twice: by its place, and by its name.")
        return function(*args, **kwargs)

    return call
