"""`baton bench`: the options, the warm-up, the progress bar, the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from baton.core.errors import StartupError
from baton.options import NumberRange
from launch.bench.load import Lengths, Load, parse_lengths

if TYPE_CHECKING:
    from launch.bench.client import Target
    from launch.bench.stats import Record


class _LengthsType(click.ParamType[Lengths]):
    name = "N|LO-HI"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        if isinstance(value, Lengths):
            return value
        try:
            return parse_lengths(value)
        except ValueError:
            self.fail(f"{value!r} is neither a length nor a range such as 128-1024", param, ctx)


_LENGTHS = _LengthsType()


@click.command("bench")
@click.argument("url", default="http://127.0.0.1:8100")
@click.option("--model", default="", help="Model to ask for; default the first of /v1/models.")
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True, help="Clients in a closed loop.")
@click.option("--requests", type=click.IntRange(1), default=None, help="How many; default 8 per client.")
@click.option("--input-len", type=_LENGTHS, default="512", show_default=True, help="Prompt length.")
@click.option("--output-len", type=_LENGTHS, default="64", show_default=True, help="Output tokens.")
@click.option(
    "--prompts",
    type=click.Choice(["tokens", "text"]),
    default="tokens",
    show_default=True,
    help="Token ids, or words (lengths then count words).",
)
@click.option("--token-ids", type=_LENGTHS, default="300-3999", show_default=True, help="Ids that prompts are made of.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same requests.")
@click.option("--warmup", type=click.IntRange(0), default=None, help="Uncounted requests before; default 1 per client.")
@click.option(
    "--timeout-s", type=NumberRange(0.1), default=600.0, show_default=True, help="Longest a request may take."
)
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, writable=True), help="Write everything as JSON.")
@click.option("--markdown", "markdown_path", type=click.Path(dir_okay=False, writable=True), help="Write the table.")
def bench_command(
    url: str,
    model: str,
    concurrency: int,
    requests: int | None,
    input_len: Lengths,
    output_len: Lengths,
    prompts: str,
    token_ids: Lengths,
    seed: int,
    warmup: int | None,
    timeout_s: float,
    api_key: str,
    json_path: str | None,
    markdown_path: str | None,
) -> int:
    """Measure TTFT, TPOT, ITL and throughput of any OpenAI-compatible server at URL."""
    import asyncio

    from launch.bench.client import Target, base_url, first_model

    if min(input_len.low, output_len.low) < 1:
        raise StartupError("--input-len and --output-len must be at least 1")
    base = base_url(url)
    try:
        model = model or first_model(base, api_key)
    except OSError as error:
        raise StartupError(f"no server answers: {error}") from None
    load = Load(seed, input_len, output_len, prompts == "text", token_ids)
    target = Target(base, model, api_key, timeout_s, {})
    count = 8 * concurrency if requests is None else requests
    warm = concurrency if warmup is None else warmup
    records = asyncio.run(_measure(target, load, concurrency, count, warm))
    settings = {
        "url": base,
        "model": model,
        "concurrency": concurrency,
        "requests": count,
        "warmup": warm,
        "input_len": str(input_len),
        "output_len": str(output_len),
        "prompts": prompts,
        "seed": seed,
    }
    return _report(records, settings, json_path, markdown_path)


async def _measure(target: Target, load: Load, concurrency: int, count: int, warmup: int) -> list[Record]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from launch.bench.client import run_load

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Two refreshes a second: the bar must not take the processor from what is measured.
    with Progress(
        *columns, TextColumn("{task.fields[failed]}"), console=Console(stderr=True), refresh_per_second=2
    ) as bar:
        warming = bar.add_task("warm-up", total=warmup, failed="", visible=warmup > 0)
        await run_load(target, load, 0, warmup, concurrency, lambda record: bar.advance(warming))
        running = bar.add_task("measuring", total=count, failed="")
        failures = 0

        def done(record: Record) -> None:
            nonlocal failures
            failures += record.error is not None
            bar.update(running, advance=1, failed=f"[red]{failures} failed" if failures else "")

        return await run_load(target, load, warmup, count, concurrency, done)


def _report(records: list[Record], settings: dict[str, Any], json_path: str | None, markdown_path: str | None) -> int:
    from pathlib import Path

    import orjson
    from rich.console import Console

    from launch.bench.report import as_json, as_markdown, print_report
    from launch.bench.stats import statistics

    stats = statistics(records)
    console = Console()
    console.print("  ".join(f"{key} {value}" for key, value in settings.items()), style="dim", highlight=False)
    print_report(stats, console)
    try:
        if json_path:
            written = orjson.dumps(as_json(stats, settings, records), option=orjson.OPT_INDENT_2)
            Path(json_path).write_bytes(written + b"\n")
        if markdown_path:
            Path(markdown_path).write_text(as_markdown(stats, settings))
    except OSError as error:
        raise StartupError(f"the report could not be written: {error}") from None
    return 1 if stats.failed == stats.requests else 0
