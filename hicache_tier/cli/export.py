"""`hicache-tier export`: pages of a store as a Zarr archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hicache_tier.errors import InvalidArgumentError

from .app import FINDING
from .key import key_option
from .numbers import Size
from .output import byte_progress, count, json_option, print_json, show, show_records, size

_MAX_KEY_LINE = 4096
_WHY = {
    "changed": "given up or replaced by the store while it was exported",
    "copies": "stored more than once",
    "damaged": "damaged, and not served either",
    "not_selected": "not asked for",
    "over_size": "above the size asked for",
    "unverifiable": "without a checksum, after a power loss",
}


def read_keys(path: Path) -> frozenset[bytes]:
    """Read page keys, hex digits, one a line."""
    from hicache_tier_storage.archive.prompts import lines_of
    from hicache_tier_storage.keys import normalise_key

    keys = set()
    try:
        for at, line in enumerate(lines_of(path, _MAX_KEY_LINE), 1):
            if line.strip():
                try:
                    keys.add(normalise_key(line.strip()))
                except InvalidArgumentError as error:
                    raise InvalidArgumentError(f"{path}, line {at}: {error}") from error
    except InvalidArgumentError:
        raise
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} cannot be read as keys: {error}") from error
    return frozenset(keys)


@click.command("export", short_help="Write pages of a store to a Zarr archive.")
@click.argument("root", type=click.Path(exists=True, file_okay=False))
@click.argument("destination", metavar="DEST")
@click.option("--namespace", "namespaces", multiple=True, metavar="DIGITS",
              help="Only namespaces that begin so; `inspect` lists them.")  # fmt: skip
@click.option("--keys", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Only pages whose keys (hex, one a line) are in this file.")  # fmt: skip
@click.option("--tokens", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Only pages of prompts in this file: .npy, or text with token ids, a prompt a line. "
                   "The archive then holds the token ids, which other page sizes need.")  # fmt: skip
@click.option("--tenant", "tenants", multiple=True, envvar="HICACHE_TIER_TENANT",
              help="Salt that keys of --tokens may have been made with.")  # fmt: skip
@click.option("--max-size", "max_nbytes", type=Size(), help="At most so much payload, whole prefixes first.")
@click.option("--first", type=click.Choice(["used", "newest"]), default="used", show_default=True,
              help="With --max-size: pages used last, or made last, come first.")  # fmt: skip
@click.option("--codec", type=click.Choice(["none", "fast", "small", "zstd"]), default="none",
              show_default=True, help="fast: lz4; small: Zstandard, slow; zstd: for fp8.")  # fmt: skip
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True,
              help="1: threads of this process.")  # fmt: skip
@click.option("--full-speed", is_flag=True,
              help="Also where a server writes to the store, which is then slowed down.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace an archive that is there.")
@click.option("--sync", is_flag=True, help="Have all on disk before the archive appears.")
@click.option("--dry-run", is_flag=True, help="Only say what would be written.")
@key_option
@json_option
@click.pass_context
def command(  # noqa: PLR0917 - click passes options by name
    ctx: click.Context,
    root: str,
    destination: str,
    namespaces: tuple[str, ...],
    keys: Path | None,
    tokens: tuple[Path, ...],
    tenants: tuple[str, ...],
    max_nbytes: int | None,
    first: str,
    codec: str,
    processes: int,
    full_speed: bool,
    overwrite: bool,
    sync: bool,
    dry_run: bool,
    encryption: str | None,
    as_json: bool,
) -> None:
    """Write the pages of the store at ROOT to DEST: a folder, a .zip, or the URL of an object store.

    Works while servers use the store, and then keeps out of their way. The archive is ordinary Zarr v3
    with named dimensions. An export that was stopped goes on where it was when the same command is given
    again. Pages of an encrypted store are decrypted: the archive is not encrypted. Exit code 1 where
    pages of the store are damaged, or none is wanted: then no archive is made.
    """
    from hicache_tier_storage.archive import Selection, export_archive
    from hicache_tier_storage.archive.prompts import read_prompts

    selection = Selection(
        namespaces=namespaces,
        keys=None if keys is None else read_keys(keys),
        prompts=tuple(prompt for path in tokens for prompt in read_prompts(path)) if tokens else None,
        tenants=tenants,
        max_nbytes=max_nbytes,
        first=first,
    )
    try:
        with byte_progress("exporting") as tell:
            report = export_archive(
                root,
                destination,
                selection=selection,
                codec=codec,
                processes=processes,
                polite=False if full_speed else None,
                overwrite=overwrite,
                sync=sync,
                dry_run=dry_run,
                progress=tell,
                encryption=encryption,
            ).as_dict()
    except KeyboardInterrupt:
        click.echo("Stopped; the same command goes on where it was.", err=True)
        raise
    if as_json:
        print_json(report)
    else:
        _show(root, report)
    if not report["pages"] or report["left_out"].get("damaged") or report["problems"]:
        ctx.exit(FINDING)


def _show(root: str, report: dict[str, Any]) -> None:
    if not report["pages"] and not report["problems"]:
        why = "; ".join(
            f"{pages} {_WHY.get(reason, reason)}" for reason, pages in sorted(report["left_out"].items())
        )
        show(f"no page of {root} is to be exported, and no archive is made" + (f": {why}" if why else ""))
        return
    rows = [(p["namespace"], p["rank"], p["pool"], p["pages"], size(p["bytes"])) for p in report["parts"]]
    show_records(("namespace", "rank", "pool", ">pages", ">payload"), rows)
    for reason, pages in sorted(report["left_out"].items()):
        show(f"left out: {count(pages, 'page')} {_WHY.get(reason, reason)}")
    for problem in report["problems"]:
        show(f"not exported: {problem}")
    what = f"{count(report['pages'], 'page')}, {size(report['bytes'])} of {root}"
    if report["dry_run"]:
        show(f"{what} would be written to {report['destination']}")
        return
    rate = report["bytes"] / max(report["seconds"], 1e-9) / 1e9
    resumed = f", {report['resumed_pages']} of them by an earlier run" if report["resumed_pages"] else ""
    show(
        f"{what} written to {report['destination']}{resumed}: {size(report['stored_bytes'])}, "
        f"codec {report['codec']}, {report['seconds']:.1f} s, {rate:.2f} GB/s"
    )
