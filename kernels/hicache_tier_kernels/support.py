"""Whether something works here, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Support:
    """A yes or no with its reason; true where `ok`.

    Attributes
    ----------
    ok : bool
    reason : str
        Why not, or a remark on how; may be empty where `ok`.
    """

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok
