"""What a worker is to do, as plain data that travels to it in a file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from .models import ModelSource, SourceKind
from .options import DemoOptions


class Phase(StrEnum):
    """The two processes."""

    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True, slots=True)
class Job:
    """One worker's work.

    Attributes
    ----------
    phase : Phase
        `cold` reads the prompt without a cache and keeps its pages; `warm` loads them and goes on.
    root : str
        The store.
    scratch : str
        A folder that both workers share: the prompt's tokens, the logits, dequantised weights. No KV.
    """

    phase: Phase
    root: str
    scratch: str
    source: ModelSource
    options: DemoOptions

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Job:
        """Read what `as_dict` wrote."""
        source = ModelSource(**dict(data["source"], kind=SourceKind(data["source"]["kind"])))
        return cls(
            Phase(data["phase"]), data["root"], data["scratch"], source, DemoOptions(**data["options"])
        )
