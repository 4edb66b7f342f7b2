"""`kitty bench`: the engine's speed on fixed shapes or under a load, kitty beside 16 bits in the same run."""

from __future__ import annotations

import itertools
import math
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kitty_cli import options, output
from kitty_cli.open_model import ModelFlags, OpenedModel, note_what_runs, open_model
from kitty_runtime.config import PRESETS, CacheConfig, cache_config
from kitty_runtime.config import preset as preset_named
from kitty_runtime.engine.limits import EngineLimits
from kitty_runtime.errors import ConfigError, MemoryLimitError

if TYPE_CHECKING:
    from kitty_runtime.bench.load import Load, LoadResult
    from kitty_runtime.bench.shapes import BenchMethod, Shape, ShapeResult
    from kitty_runtime.layer_kl import Progress
    from kitty_runtime.profiles import BoostProfile

Format = Literal["table", "json", "md", "csv"]
LoadFormat = Literal["auto", "dummy"]

_SHAPES = "Fixed shapes"
_LOAD = "Load"


def bench(
    model: options.Model = None,
    batch_size: Annotated[
        str, typer.Option("--batch-size", "-b", help="Sequences at once, such as 1,32.", rich_help_panel=_SHAPES)
    ] = "1",
    input_len: Annotated[
        str,
        typer.Option(help="Prompt tokens, such as 4096,16384; for a load LEAST:MOST.", rich_help_panel=_SHAPES),
    ] = "512",
    output_len: Annotated[
        str, typer.Option(help="Generated tokens; for a load LEAST:MOST.", rich_help_panel=_SHAPES)
    ] = "128",
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", help="Measured turns of a shape.", min=1, rich_help_panel=_SHAPES)
    ] = 5,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Requests of a load, in place of shapes.", min=1, rich_help_panel=_LOAD, show_default=False),
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Arrivals per second; inf is all at once.", min=1e-9, rich_help_panel=_LOAD)
    ] = math.inf,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences at once.", min=1, rich_help_panel=_LOAD)] = 256,
    seed: Annotated[int, typer.Option(help="Of lengths and tokens.", min=0, rich_help_panel=_LOAD)] = 0,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for weights and cache, such as 40GB: a load keeps to it, and the largest batch is said.",
            show_default=False,
        ),
    ] = None,
    max_batch_tokens: Annotated[int, typer.Option(help="Tokens per step.", min=1)] = 2048,
    compiled: options.Compile = True,
    baseline: Annotated[bool, typer.Option(help="Measure 16 bits too.")] = True,
    load_format: Annotated[LoadFormat, typer.Option(help="dummy: random weights, only the config is read.")] = "auto",
    format: Annotated[Format, typer.Option(help="table, json, md or csv.")] = "table",
    preset: options.Preset = None,
    bits: options.Bits = None,
    k_bits: options.KBits = None,
    v_bits: options.VBits = None,
    boost: options.Boost = None,
    profile: options.ProfileFile = None,
    device: options.Device = "auto",
    dtype: options.DtypeName = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Measure speed and memory on fixed shapes, or under a load of requests, in process and without HTTP."""
    config = cache_config(preset, bits, k_bits, v_bits, boost)
    memory_bytes = options.size_in_bytes(memory)
    if num_prompts is None and math.isfinite(request_rate):
        raise ConfigError(f"--request-rate {request_rate} without a load.", "Add --num-prompts, or leave it out.")
    if num_prompts is not None and batch_size != "1":
        raise ConfigError(f"--batch-size {batch_size} with a load.", "A load has --max-num-seqs instead.")
    work = (
        _shapes(batch_size, input_len, output_len)
        if num_prompts is None
        else _load(num_prompts, input_len, output_len, request_rate, seed)
    )
    flags = ModelFlags(model, config, profile, device, dtype, trust_remote_code)
    opened = _open_dummy(flags) if load_format == "dummy" else open_model(flags)
    methods = _methods(config, opened.profile, baseline)
    _check_context(work, opened.geometry.max_position_embeddings)
    kv_bytes = None if memory_bytes is None else _kv_bytes(opened, memory_bytes)

    limits = EngineLimits(
        kv_bytes=kv_bytes, max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, compiled=compiled
    )

    from kitty_cli import bench_report

    report = bench_report.start(opened, methods, memory_bytes, kv_bytes, _command())
    with output.progress() as progress:
        if isinstance(work, list):
            results = _run_shapes(opened, methods, work, repetitions, limits, progress)
            bench_report.show_shapes(report, results, format)
            if all(result.error for result in results):
                raise typer.Exit(1)
        else:
            bench_report.show_load(report, work, _run_load(opened, methods, work, limits, progress), format)


def _run_shapes(
    opened: OpenedModel,
    methods: dict[str, BenchMethod],
    shapes: list[Shape],
    repetitions: int,
    limits: EngineLimits,
    progress: Progress,
) -> list[ShapeResult]:
    from kitty_runtime.bench.shapes import bench_shape

    results, done, total = [], 0, len(shapes) * len(methods) * (repetitions + 1)

    def on_turn() -> None:
        nonlocal done
        done += 1
        progress("turns", done, total)

    progress("turns", 0, total)
    for shape in shapes:
        results += bench_shape(opened.model, methods, shape, repetitions, limits, on_turn)
    return results


def _run_load(
    opened: OpenedModel, methods: dict[str, BenchMethod], load: Load, limits: EngineLimits, progress: Progress
) -> list[LoadResult]:
    from kitty_runtime.bench.load import bench_load

    results, done = [], 0

    def on_done() -> None:
        nonlocal done
        done += 1
        progress("requests", done, len(methods) * load.num_prompts)

    progress("requests", 0, len(methods) * load.num_prompts)
    for name, method in methods.items():
        results.append(bench_load(opened.model, name, method, load, limits, on_done))
    return results


def _methods(config: CacheConfig, profile: BoostProfile | None, baseline: bool) -> dict[str, BenchMethod]:
    """kitty's settings by their preset's name where they are one, and 16 bits."""
    from kitty_cli.bench_report import DENSE
    from kitty_runtime.bench.shapes import BenchMethod

    name = next((name for name, known in PRESETS.items() if known == config), "custom")
    methods = {name: BenchMethod(config, profile)}
    return methods | {DENSE: BenchMethod(preset_named(DENSE))} if baseline else methods


def _kv_bytes(opened: OpenedModel, memory_bytes: int) -> int:
    """What a memory leaves for the cache beside the weights and, on a GPU, the runtime.

    Raises:
        MemoryLimitError: nothing.
    """
    from kitty_runtime.memory import runtime_bytes

    weights: int = sum(parameter.nbytes for parameter in opened.model.parameters())
    runtime = runtime_bytes(memory_bytes) if opened.model.device.type == "cuda" else 0
    if memory_bytes <= weights + runtime:
        raise MemoryLimitError(
            f"--memory {output.size(memory_bytes)} leaves nothing for the cache: the weights take "
            f"{output.size(weights)}" + (f", the runtime {output.size(runtime)}." if runtime else "."),
            "Give it more.",
        )
    return memory_bytes - weights - runtime


def _check_context(work: list[Shape] | Load, max_len: int | None) -> None:
    """
    Raises:
        ConfigError: a shape, or the longest request of a load, that the model was not made for.
    """
    if isinstance(work, list):
        longest = max(shape.input_len + shape.output_len for shape in work)
    else:
        longest = work.input_len[1] + work.output_len[1]
    if max_len is not None and longest > max_len:
        raise ConfigError(
            f"Prompt and generated tokens come to {longest}, the model's context is {max_len}.",
            "Lower --input-len or --output-len.",
        )


def _shapes(batch_size: str, input_len: str, output_len: str) -> list[Shape]:
    """Every combination of the three lists."""
    from kitty_runtime.bench.shapes import Shape

    lists = (
        _numbers("--batch-size", batch_size), _numbers("--input-len", input_len), _numbers("--output-len", output_len)
    )  # fmt: skip
    return [Shape(*sizes) for sizes in itertools.product(*lists)]


def _load(num_prompts: int, input_len: str, output_len: str, request_rate: float, seed: int) -> Load:
    from kitty_runtime.bench.load import Load

    lengths = _range("--input-len", input_len), _range("--output-len", output_len)
    return Load(num_prompts, *lengths, request_rate=request_rate, seed=seed)


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        hint = " LEAST:MOST is for a load: add --num-prompts." if ":" in text else ""
        raise ConfigError(f"{flag} is {text!r}.", f"Write numbers from 1 on with commas: 1,32.{hint}")
    return numbers


def _range(flag: str, text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        found = int(least), int(most or least)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f"{flag} is {text!r}.", "A load takes one number or LEAST:MOST: 200:1000.")
    return found


def _open_dummy(flags: ModelFlags) -> OpenedModel:
    from kitty_runtime.engine.cache import ENGINE_ATTENTION
    from kitty_runtime.engine.layers import check_layers
    from kitty_runtime.models.dummy import dummy_model
    from kitty_runtime.models.geometry import geometry_of
    from kitty_runtime.models.loading import load_config, resolve_model
    from kitty_runtime.profiles import layer_boosts, load_profile

    source = resolve_model(flags.model, output.note)
    geometry = geometry_of(load_config(source, flags.trust_remote_code))
    check_layers(geometry.layers)
    profile = None if flags.profile_path is None else load_profile(flags.profile_path)
    layer_boosts(geometry.layers, flags.config, profile)
    model = dummy_model(
        source,
        dtype=flags.dtype,
        device=flags.device,
        trust_remote_code=flags.trust_remote_code,
        attn_implementation=ENGINE_ATTENTION,
    )
    note_what_runs(f"{source.name} (random weights)", model, flags.config, str(flags.profile_path or "none"))
    return OpenedModel(source.name, model, None, geometry, profile)


def _command() -> str:
    return shlex.join(["kitty", *sys.argv[1:]])
