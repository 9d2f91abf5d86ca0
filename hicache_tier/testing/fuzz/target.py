"""What is fuzzed: a reader of bytes, valid input to begin with, and which errors are answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """One reader.

    Attributes
    ----------
    name : str
    seeds : callable
        Returns valid input, a list of bytes; given a directory for scratch files.
    read : callable
        Reads bytes, given the same directory. Errors that the reader documents are caught there; whatever
        else it raises is a finding, as is what it asserts of an answer.
    """

    name: str
    seeds: Callable[[Path], list[bytes]]
    read: Callable[[bytes, Path], None]


@cache
def targets() -> dict[str, Target]:
    """Return all targets by name."""
    from . import parsers, stores

    return {target.name: target for target in (*parsers.TARGETS, *stores.TARGETS)}
