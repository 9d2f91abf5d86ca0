"""Which part of the model this process holds, as SGLang's storage configuration says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from hicache_tier.errors import InvalidArgumentError

from .facts import replica


@dataclass(frozen=True, slots=True)
class Ranks:
    """Coordinates of this process.

    Attributes
    ----------
    model : str
        The model's name, with the tag of its page format where it has one.
    tp, pp, cp : (rank, size)
        Tensor (within an attention group), pipeline and attention context parallel.
    replicated : bool
        Whether every tensor-parallel rank holds the same KV: MLA. One of them writes it.
    writer : bool
        Whether SGLang has this rank write the KV.
    dp : int
        Data parallel, of attention groups or of replicas; only metrics tell them apart.
    """

    model: str
    tp: tuple[int, int]
    pp: tuple[int, int]
    cp: tuple[int, int]
    replicated: bool
    writer: bool
    dp: int = 0

    @classmethod
    def of(cls, config: Any, model: str | None) -> Self:  # noqa: ANN401 - HiCacheStorageConfig
        """Read SGLang's storage configuration, and what it does not say of replicas.

        Raises
        ------
        InvalidArgumentError
            For what cannot be stored, or a model without a name.
        """
        if int(getattr(config, "dcp_size", 1)) > 1:
            raise InvalidArgumentError("decode context parallelism cannot be stored: --dcp-size must be 1.")
        if getattr(config, "should_split_heads", False):
            raise InvalidArgumentError(
                "tp_lcm_size asks for pages that servers of several TP sizes share. Here each TP size has "
                "pages of its own: leave it out."
            )
        name = model or config.model_name
        if not name:
            raise InvalidArgumentError("the model has no name: set the option `model`.")
        return cls(
            str(name),
            (int(config.tp_rank), int(config.tp_size)),
            (int(config.pp_rank), int(config.pp_size)),
            (int(getattr(config, "attn_cp_rank", 0)), int(getattr(config, "attn_cp_size", 1))),
            bool(config.is_mla_model),
            bool(getattr(config, "is_storage_writer", True)),
            int(getattr(config, "dp_rank", 0)) or replica(),
        )

    @property
    def label(self) -> str:
        """As metrics name it."""
        label = f"tp{self.tp[0]}-pp{self.pp[0]}-cp{self.cp[0]}"
        return f"{label}-dp{self.dp}" if self.dp else label

    @property
    def number(self) -> int:
        """Among the processes of a server."""
        return self.tp[0] + self.tp[1] * (self.pp[0] + self.pp[1] * (self.cp[0] + self.cp[1] * self.dp))
