"""Which layers a rank owns."""

from __future__ import annotations

from itertools import pairwise

from .errors import InvalidArgumentError


def layer_numbers(value: object, num_layers: int) -> tuple[int, ...]:
    """Return owned layers as a tuple of global layer numbers.

    Raises
    ------
    InvalidArgumentError
        Unless they are whole numbers in `0 .. num_layers - 1`, ascending, each once, at least one.
    """
    allowed = f"Allowed: ascending layer numbers within 0 .. {num_layers - 1}, each once."
    if not isinstance(value, tuple | list | range | set | frozenset):
        raise InvalidArgumentError(f"owned_layers must be a list of layers, got {value!r}. {allowed}")
    found = sorted(value) if isinstance(value, set | frozenset) else list(value)
    for layer in found:
        if isinstance(layer, bool) or not hasattr(layer, "__index__"):
            raise InvalidArgumentError(f"owned_layers holds {layer!r}. {allowed}")
    numbers = tuple(layer.__index__() for layer in found)
    ascending = all(a < b for a, b in pairwise(numbers))
    if not numbers or not ascending or numbers[0] < 0 or numbers[-1] >= num_layers:
        raise InvalidArgumentError(f"owned_layers is {list(numbers)}. {allowed}")
    return numbers
