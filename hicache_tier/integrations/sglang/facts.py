"""What the server's arguments say of the bytes in its pools, beyond the model's name."""

from __future__ import annotations

import json
from typing import Any, Final

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
    "speculative_draft_model_path": None,
    "speculative_draft_model_revision": None,
}
_READ: Final = (*_MODEL, *_DRAFT, "kv_cache_dtype", "model_path")


def server_arguments() -> dict[str, Any]:
    """Return SGLang's arguments of this process, as it resolved them; nothing outside of a server."""
    try:
        from sglang.srt.runtime_context import get_server_args

        arguments = get_server_args()
    except (ImportError, ValueError, AttributeError):
        return {}
    try:
        resolved: dict[str, Any] = arguments.resolved_dict()
    except (AttributeError, TypeError):  # another release
        resolved = {name: getattr(arguments, name, None) for name in _READ}
    return {name: plain(resolved.get(name)) for name in _READ}


def kv_cache_dtype(arguments: dict[str, Any]) -> str | None:
    """Return the dtype that was asked for: pools hold fp8 of either kind as bytes."""
    value = arguments.get("kv_cache_dtype")
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
    return {name: value for name, value in found.items() if value is not None and value != wanted[name]}


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
