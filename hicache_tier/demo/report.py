"""What a demo found: the same facts as JSON and for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models import ModelSource
    from .options import DemoOptions


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Results of both processes.

    Attributes
    ----------
    tokens_equal : bool
        Whether all runs wrote the same tokens: the first process without a cache, the second one from the
        store, and the second one without a cache again.
    kv_equal : bool
        Whether the second process had, in the model's cache, the very bytes that the first one had computed.
    model, layout, policy : str
    remark : str
        What the user has to know about the model; may be empty.
    root : str or None
        Where the store was left.
    cold, warm : dict
        What the workers reported.
    """

    tokens_equal: bool
    kv_equal: bool
    model: str
    layout: str
    policy: str
    remark: str
    page_tokens: int
    root: str | None
    cold: dict[str, Any]
    warm: dict[str, Any]

    @classmethod
    def of(
        cls,
        source: ModelSource,
        options: DemoOptions,
        root: str | None,
        cold: dict[str, Any],
        warm: dict[str, Any],
    ) -> DemoReport:
        """Draw the verdict from what the workers found."""
        written = cold["run"]["tokens"]
        equal = written == warm["run"]["tokens"] == warm["again"]["tokens"]
        return cls(
            tokens_equal=equal,
            kv_equal=cold["fingerprint"] == warm["fingerprint"],
            model=source.name,
            layout=options.layout,
            policy=options.policy,
            remark=source.remark,
            page_tokens=options.page_tokens,
            root=root,
            cold=cold,
            warm=warm,
        )

    @property
    def good(self) -> bool:
        """Whether nothing differs, and all pages of use to the second process came from the store."""
        return self.tokens_equal and self.kv_equal and not self.pages_missing

    @property
    def pages_missing(self) -> int:
        """Pages that the second process could have used and had to compute again."""
        usable = (int(self.cold["prompt_tokens"]) - 1) // self.page_tokens
        return usable - int(self.warm["pages_loaded"])

    @property
    def cold_seconds(self) -> float:
        """Time to the first token without a cache, in the first process."""
        return float(self.cold["run"]["first_token_seconds"])

    @property
    def warm_seconds(self) -> float:
        """Time to the first token from the store, in the second process."""
        return float(self.warm["run"]["first_token_seconds"])

    @property
    def cold_again_seconds(self) -> float:
        """Time to the first token without a cache, in the second process."""
        return float(self.warm["again"]["first_token_seconds"])

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "tokens_equal": self.tokens_equal,
            "kv_equal": self.kv_equal,
            "cold_seconds": self.cold_seconds,
            "warm_seconds": self.warm_seconds,
            "cold_again_seconds": self.cold_again_seconds,
            "pages": self.cold["pages"],
            "pages_loaded": self.warm["pages_loaded"],
            "pages_missing": self.pages_missing,
            "bytes": self.cold["bytes"],
            "bytes_loaded": self.warm["bytes_loaded"],
            "prompt_tokens": self.cold["prompt_tokens"],
            "page_tokens": self.page_tokens,
            "model": self.model,
            "remark": self.remark,
            "layout": self.layout,
            "policy": self.policy,
            "root": self.root,
            "text": self.cold["text"],
            "cold": self.cold,
            "warm": self.warm,
        }
