"""What the server's arguments say of the bytes in its pools, beyond the model's name."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# Arguments that change what KV is computed, and the value that each has where it does not.
_MODEL: Final = {
    "json_model_override_args": "{}",
    "quantization": None,
    "quantization_param_path": None,
    "revision": None,
    "weight_version": "default",
}
_DRAFT: Final = {
    "speculative_algorithm": None,
    "speculative_draft_kv_cache_dtype": None,
    "speculative_draft_model_path": None,
    "speculative_draft_model_quantization": None,
    "speculative_draft_model_revision": None,
}
_READ: Final = (*_MODEL, *_DRAFT, "kv_cache_dtype", "load_format", "model_path")


def server_arguments() -> dict[str, Any]:
    """Return SGLang's arguments of this process, as they are now; nothing outside of a server.

    They change while it runs: an update of the weights brings a `weight_version` of its own.
    """
    try:
        from sglang.srt.runtime_context import get_context

        context = get_context()
        arguments = context.server_args
    except (ImportError, ValueError, AttributeError):
        return {}
    try:
        resolved: dict[str, Any] = context.resolved_server_args_dict()
    except (AttributeError, TypeError):  # another release
        resolved = {name: getattr(arguments, name, None) for name in _READ}
    return {name: plain(resolved.get(name)) for name in _READ}


def weight_version() -> object:
    """Return the version of the weights that the server computes with now; None outside of a server."""
    try:
        return _serving()().weight_version
    except (ImportError, ValueError, AttributeError):
        return None


@cache
def _serving() -> Callable[[], Any]:
    """Return SGLang's accessor; found once, because `weight_version` is asked for in each call."""
    from sglang.srt.runtime_context import get_serving

    accessor: Callable[[], Any] = get_serving
    return accessor


def replica() -> int:
    """Return which of the server's data-parallel replicas this process belongs to."""
    try:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().dp_rank or 0)
    except (ImportError, ValueError, AttributeError, RuntimeError):
        return 0


def kv_cache_dtype(arguments: dict[str, Any], *, draft: bool = False) -> str | None:
    """Return the dtype that was asked for, which a draft may have of its own: pools hold fp8 as bytes."""
    value = arguments.get("speculative_draft_kv_cache_dtype") if draft else None
    value = value or arguments.get("kv_cache_dtype")
    return value if isinstance(value, str) else None


def server_facts(arguments: dict[str, Any], *, one_byte: bool, draft: bool) -> dict[str, Any]:
    """Return what decides the bytes of a pool, as plain data.

    Parameters
    ----------
    arguments : dict
        `server_arguments()`.
    one_byte : bool
        Whether the pool's elements are single bytes, which do not say what they mean.
    draft : bool
        Whether the pool holds a draft model's layers.
    """
    wanted = _MODEL | (_DRAFT if draft else {}) | ({"kv_cache_dtype": None} if one_byte else {})
    found = {name: arguments.get(name) for name in sorted(wanted)}
    facts = {name: value for name, value in found.items() if value is not None and value != wanted[name]}
    if arguments.get("load_format") == "dummy":  # random weights; other formats hold the same ones
        facts["load_format"] = "dummy"
    return facts


def labelled(model: str, facts: dict[str, Any]) -> str:
    """Return a model's name with facts, as an identity has it: two that differ in any fact differ."""
    return f"{model} #{json.dumps(facts, sort_keys=True, separators=(',', ':'))}" if facts else model


def plain(value: object) -> Any:  # noqa: ANN401 - JSON
    """Return plain data for an attribute: numbers, texts, and lists of them; anything else as its text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return str(value).removeprefix("torch.")
