"""`hicache-tier import`: pages of an archive into a store."""

from __future__ import annotations

from typing import Any

import click

from hicache_tier.layout import Layout

from .app import FINDING
from .key import key_option
from .output import byte_progress, count, json_option, print_json, show, show_records, size, table

_MOST_SHOWN = 20


@click.command("import", short_help="Bring pages of an archive into a store.")
@click.argument("source", metavar="SRC")
@click.argument("root", type=click.Path(file_okay=False))
@click.option("--namespace", "namespaces", multiple=True, metavar="DIGITS",
              help="Only namespaces of the archive that begin so.")  # fmt: skip
@click.option(
    "--layout", type=click.Choice([layout.value for layout in Layout]), help="Another order of axes."
)
@click.option("--page-tokens", type=click.IntRange(1),
              help="Another page size; needs token ids (export --tokens).")  # fmt: skip
@click.option("--tp", type=click.IntRange(1), help="Another tensor-parallel size: heads are split or joined.")
@click.option("--kv-heads", type=click.IntRange(1),
              help="KV heads of the model, where ranks hold copies of a head.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Another dtype.")
@click.option("--allow-lossy", is_flag=True, help="Let --dtype round values.")
@click.option("--tenant", "tenants", multiple=True, envvar="HICACHE_TIER_TENANT",
              help="Salt of a tenant whose pages are wanted; archives hold digests only.")  # fmt: skip
@click.option("--capacity", metavar="SIZE", help="Cap on the store; as it states itself where not given.")
@click.option("--to-host", is_flag=True,
              help="Then read the pages back, those used last first, so that they lie in memory "
                   "when a server starts.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would be imported.")
@key_option
@json_option
@click.pass_context
def command(  # noqa: PLR0917 - click passes options by name
    ctx: click.Context,
    source: str,
    root: str,
    namespaces: tuple[str, ...],
    layout: str | None,
    page_tokens: int | None,
    tp: int | None,
    kv_heads: int | None,
    dtype: str | None,
    allow_lossy: bool,
    tenants: tuple[str, ...],
    capacity: str | None,
    to_host: bool,
    dry_run: bool,
    encryption: str | None,
    as_json: bool,
) -> None:
    """Bring the pages of the archive SRC (folder, .zip, URL) into the store at ROOT, new or in use.

    Every page is checked. Pages that are there already are skipped, and none is pushed out. Exit code 1
    where a page was refused; the reasons are listed.
    """
    from hicache_tier_storage.archive import Conversion, import_archive

    conversion = Conversion.parse(
        layout=layout,
        page_tokens=page_tokens,
        tp=tp,
        kv_heads=kv_heads,
        dtype=dtype,
        allow_lossy=allow_lossy,
    )
    try:
        with byte_progress("importing") as report:
            found = import_archive(
                source,
                root,
                conversion=conversion,
                tenants=tenants,
                namespaces=namespaces,
                capacity_bytes=capacity,
                to_host=to_host,
                dry_run=dry_run,
                progress=report,
                encryption=encryption,
            ).as_dict()
    except KeyboardInterrupt:
        click.echo("Stopped; what is stored stays, and the same command brings the rest.", err=True)
        raise
    if as_json:
        print_json(found)
    else:
        _show(found)
    if found["refused"]:
        ctx.exit(FINDING)


def _show(report: dict[str, Any]) -> None:
    columns = ("namespace", "rank", "pool", ">imported", ">there already")
    rows = [
        (p["namespace"], p["rank"], p["pool"], p["imported"], p["already_stored"]) for p in report["parts"]
    ]
    if rows:
        show_records(columns, rows)
    if report["details"]:
        shown = report["details"][:_MOST_SHOWN]
        show(table("Refused", ("part", "page", "why"), ((d["part"], d["key"], d["reason"]) for d in shown)))
        counts = ", ".join(f"{pages} {reason}" for reason, pages in sorted(report["refused"].items()))
        show(f"{count(sum(report['refused'].values()), 'page')} refused: {counts}")
    if report["dry_run"]:
        show(f"{count(report['imported'], 'page')} would be imported into {report['root']}")
        return
    rate = report["bytes"] / max(report["seconds"], 1e-9) / 1e9
    show(
        f"{count(report['imported'], 'page')}, {size(report['bytes'])} imported into {report['root']}; "
        f"{report['already_stored']} there already; {report['seconds']:.1f} s, {rate:.2f} GB/s"
    )
    if report["host_pages"]:
        show(f"{count(report['host_pages'], 'page')}, {size(report['host_bytes'])} read back into memory")
