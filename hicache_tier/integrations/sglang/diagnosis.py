"""How much of a store a configuration can read, and why not the rest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from hicache_tier.layout import Layout
from hicache_tier_storage.encryption import ALGORITHM
from hicache_tier_storage.inspection import inspect_root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .options import Options

KEYS = "sglang-sha256-chain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What is known of a server; what is None is not compared.

    Attributes
    ----------
    options : Options, optional
        Its extra config.
    model : str, optional
        Its served model name.
    layout : Layout, optional
    dtype : str, optional
    page_tokens, num_layers, num_kv_heads : int, optional
        Of one rank.
    tp_size, pp_size, cp_size : int, optional
    """

    options: Options | None = None
    model: str | None = None
    layout: Layout | None = None
    dtype: str | None = None
    page_tokens: int | None = None
    num_layers: int | None = None
    num_kv_heads: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    cp_size: int | None = None

    @property
    def told(self) -> bool:
        """Whether anything is known."""
        return self != Configuration()

    def expected(self) -> dict[str, object]:
        """Return the fields of an identity that are known; None in them means absent."""
        known: dict[str, object] = {
            "dtype": self.dtype,
            "page_tokens": self.page_tokens,
            "layers": self.num_layers,
            "heads": self.num_kv_heads,
            "axis order": self.layout.page_axes if self.layout else None,
            **{f"{axis} size": getattr(self, f"{axis}_size") for axis in ("tp", "pp", "cp")},
        }
        known = {name: value for name, value in known.items() if value is not None}
        options = self.options
        model = (options.model if options else None) or self.model
        if model is not None:
            known["model"] = model
        if options is not None:
            salt = options.tenant
            known |= {
                "revision": options.revision,
                "scales": options.scales,
                "rope": options.rope,
                "adapter": options.adapter,
                "tenant": None if salt is None else hashlib.sha256(salt.encode()).hexdigest()[:16],
                "encryption": None if options.encryption is None else ALGORITHM,
            }
        return known | {"keys": KEYS}


class Basis(StrEnum):
    """Where a configuration came from."""

    SAID = "said"
    OPEN = "open"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Finding:
    """One namespace of a root.

    Attributes
    ----------
    root, namespace, model, pool : str
    facts : dict
        What else SGLang said of the pool and the model.
    pages : int
    in_use : bool
        Whether a process has it open for writing.
    why : list of str
        Why the configuration cannot read it; nothing where it can.
    """

    root: str
    namespace: str
    model: str
    pool: str
    facts: dict[str, Any]
    pages: int
    in_use: bool
    why: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {name: getattr(self, name) for name in self.__slots__} | {"readable": not self.why}


def basis(configuration: Configuration, found: Sequence[Finding]) -> Basis:
    """Return what `diagnose` compared with; `NONE` means that only what SGLang needs always was compared."""
    if configuration.told:
        return Basis.SAID
    return Basis.OPEN if any(one.in_use for one in found) else Basis.NONE


def diagnose(roots: Sequence[str], configuration: Configuration) -> list[Finding]:
    """Compare every namespace of some roots with a configuration.

    Where nothing is known of the configuration, it is that of the processes that have the store open now.
    """
    spaces = [(root, space) for root in roots for space in inspect_root(root)["namespaces"]]
    live = [_stated(space) for _, space in spaces if _in_use(space)]
    found = []
    for root, space in spaces:
        stated = _stated(space)
        if configuration.told or not live:
            why = _differences(stated, configuration.expected())
        else:
            why = min((_differences(stated, other) for other in live), key=len)
        model, facts = _unlabelled(space["identity"].get("model"))
        pages = sum(part["pages"] for part in space["partitions"])
        pools = ", ".join(space["identity"].get("pools", {}))
        damaged = space["damage"] or []
        found.append(
            Finding(root, space["namespace"], model, pools, facts, pages, _in_use(space), [*damaged, *why])
        )
    return found


def _in_use(space: dict[str, Any]) -> bool:
    return any(part["writer_live"] for part in space["partitions"])


def _stated(space: dict[str, Any]) -> dict[str, object]:
    """Return an identity's fields under the names of `Configuration.expected`."""
    identity = space["identity"]
    pools: dict[str, dict[str, Any]] = identity.get("pools", {})
    geometry: dict[str, Any] = next(iter(pools.values()), {})
    model, facts = _unlabelled(identity.get("model"))
    opaque = geometry.get("kind") == "indexer"
    components = geometry.get("components") or [{}]
    parallel = identity.get("parallel", {})
    return {
        "model": model,
        "facts": facts,
        "revision": identity.get("revision"),
        "scales": identity.get("scales"),
        "rope": identity.get("rope"),
        "adapter": identity.get("adapter"),
        "tenant": identity.get("tenant_sha256"),
        "encryption": identity.get("encryption", {}).get("algorithm"),
        "keys": identity.get("key_algorithm"),
        "page_tokens": geometry.get("page_tokens"),
        # Opaque pools have neither, and replicated ones no heads to cut: there is nothing to compare.
        **({} if opaque else {"dtype": geometry.get("dtype"), "layers": geometry.get("num_layers")}),
        **({"heads": components[0].get("heads")} if geometry.get("kind") == "mha" else {}),
        **({} if opaque else {"axis order": identity.get("axis_order")}),
        **{f"{axis} size": size for axis, size in parallel.items()},
    }


def _differences(stated: dict[str, object], expected: dict[str, object]) -> list[str]:
    """Return what differs, in words; fields that either does not have are not compared."""
    return [
        _difference(name, stated[name], value)
        for name, value in expected.items()
        if name in stated and stated[name] != value
    ]


def _difference(name: str, stored: object, value: object) -> str:
    if name == "keys" and value == KEYS:
        return f"keys: made from Python ({stored}), not by SGLang, which looks for keys of its own"
    return f"{name}: stored with {_said(name, stored)}, this configuration has {_said(name, value)}"


def _said(name: str, value: object) -> str:
    if value is None:
        return "none"
    if name == "axis order":
        layouts = [layout.value for layout in Layout.with_page_axes(value)]
        return f"{value} ({' or '.join(layouts)})" if layouts else str(value)
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else str(value)


def _unlabelled(model: str | None) -> tuple[str, dict[str, Any]]:
    """Take a model's name and its facts apart again."""
    name, mark, text = (model or "").partition(" #{")
    if not mark:
        return name, {}
    try:
        facts = json.loads("{" + text)
    except (ValueError, RecursionError):
        return model or "", {}
    return name, facts if isinstance(facts, dict) else {}
