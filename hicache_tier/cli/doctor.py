"""`hicache-tier doctor`: how much of a store a server's configuration can read, and why not the rest."""

from __future__ import annotations

import json
import tomllib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hicache_tier.errors import InvalidArgumentError

from .app import FINDING
from .output import count, json_option, print_json, show, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_tier.integrations.sglang.diagnosis import Finding

_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@click.command("doctor", short_help="Tell what a server can read of a store, and why not the rest.")
@click.argument("roots", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False))
@click.option(
    "--extra-config",
    help="SGLang's --hicache-storage-backend-extra-config: JSON, or @FILE in JSON, TOML or YAML.",
)
@click.option("--model", help="The served model name.")
@click.option("--layout", type=click.Choice(_LAYOUTS), help="SGLang's --hicache-mem-layout.")
@click.option("--dtype", help="Dtype of the KV cache, for example bfloat16.")
@click.option("--page-size", type=click.IntRange(1), help="SGLang's --page-size.")
@click.option("--layers", type=click.IntRange(1), help="Layers of one rank.")
@click.option("--heads", type=click.IntRange(1), help="KV heads of one rank.")
@click.option("--tp", type=click.IntRange(1), help="Tensor parallel size, within an attention group.")
@click.option("--pp", type=click.IntRange(1), help="Pipeline parallel size.")
@click.option("--cp", type=click.IntRange(1), help="Attention context parallel size.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    roots: Sequence[str],
    extra_config: str | None,
    as_json: bool,
    **said: Any,  # noqa: ANN401 - the other options, by name
) -> None:
    """Compare what the stores at ROOTS hold with a server's configuration.

    What is not said is not compared. Where nothing is said, the configuration is that of the servers that
    have the store open now; where none has, the doctor can only tell pages that no SGLang reads. Exit code 1
    where pages are stored and a configuration that is known can read none of them.
    """
    from hicache_tier.dtypes import DType
    from hicache_tier.integrations.sglang.diagnosis import Basis, Configuration, basis, diagnose
    from hicache_tier.integrations.sglang.options import Options
    from hicache_tier.layout import Layout

    options = None if extra_config is None else Options.parse({"root": list(roots)} | _config(extra_config))
    configuration = Configuration(
        options=options,
        model=said["model"],
        layout=None if said["layout"] is None else Layout.parse(said["layout"]),
        dtype=None if said["dtype"] is None else DType.parse(said["dtype"]).label,
        page_tokens=said["page_size"],
        num_layers=said["layers"],
        num_kv_heads=said["heads"],
        tp_size=said["tp"],
        pp_size=said["pp"],
        cp_size=said["cp"],
    )
    found = diagnose(roots, configuration)
    compared = basis(configuration, found)
    stored = sum(one.pages for one in found)
    readable = sum(one.pages for one in found if not one.why)
    if as_json:
        namespaces = [one.as_dict() for one in found]
        told = {"stored": stored, "readable": readable, "configuration": compared.value}
        print_json(told | {"namespaces": namespaces})
    else:
        _show(found, stored, readable)
        if compared is Basis.NONE:
            show("No option was given and no server has the store open: only keys were compared.")
    if stored and not readable and compared is not Basis.NONE:
        ctx.exit(FINDING)


def _config(text: str) -> dict[str, Any]:
    """Read the extra config as SGLang does."""
    said = f"--extra-config {text}" if text.startswith("@") else "--extra-config"  # it may hold secrets
    try:
        config = _read(Path(text[1:])) if text.startswith("@") else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{said} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"{said} must be an object, got {type(config).__name__}.")
    return {name: value for name, value in config.items() if name not in {"root", "roots"}}


def _read(path: Path) -> object:
    """Read a file by its suffix; raise ValueError where it does not hold what that says."""
    content = path.read_text("utf-8")
    match path.suffix.lower():
        case ".json":
            return json.loads(content)
        case ".toml":
            return tomllib.loads(content)
        case ".yaml" | ".yml":
            return _yaml(content)
    raise InvalidArgumentError(f"--extra-config: {path} must end in .json, .toml, .yaml or .yml.")


def _yaml(content: str) -> object:
    """Read YAML where PyYAML is installed, as it is beside SGLang."""
    try:
        yaml = import_module("yaml")  # optional, and without types
    except ImportError as error:
        raise InvalidArgumentError(
            "--extra-config: a YAML file needs PyYAML (pip install pyyaml); or write it as JSON."
        ) from error
    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _show(found: Sequence[Finding], stored: int, readable: int) -> None:
    from rich.text import Text

    rows = [
        (
            one.namespace[:8],
            one.model,
            one.pool,
            one.pages,
            "yes" if one.in_use else "",
            ", ".join(f"{name} {value}" for name, value in one.facts.items()),
            "no" if one.why else "yes",
        )
        for one in sorted(found, key=lambda one: (bool(one.why), -one.pages))
    ]
    show(table(None, ("namespace", "model", "pool", ">pages", "open now", "with", "readable"), rows))
    for one in found:
        for line in one.why:
            show(Text.assemble((f"{one.namespace[:8]}  ", "dim"), line))
    show(f"stored {count(stored, 'page')}, readable by this configuration {readable}")
