"""Enums whose members users give by name."""

from __future__ import annotations

from enum import Enum
from typing import Self

from .errors import not_known


class Named(Enum):
    """An enum whose values are the names that users give; subclasses say what they name."""

    @classmethod
    def parse(cls, value: object) -> Self:
        """Take a member or its name; anything else raises `InvalidArgumentError` with the nearest name."""
        if isinstance(value, cls):
            return value
        allowed = [member.value for member in cls]
        if value in allowed:
            return cls(value)
        raise not_known(cls._noun(), value, allowed)

    @classmethod
    def _noun(cls) -> str:
        raise NotImplementedError
