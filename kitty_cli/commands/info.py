"""`kitty info`: what the cache of a model costs, from its config alone; or what a profile holds."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kitty_cli import options, output
from kitty_runtime.config import CacheConfig, cache_config
from kitty_runtime.errors import ConfigError

if TYPE_CHECKING:
    from kitty_runtime.memory import MemoryPlan
    from kitty_runtime.models.geometry import ModelGeometry
    from kitty_runtime.profiles import BoostProfile

CONTEXTS = (1024, 8192, 32768, 131072)
"""Context lengths, in tokens, at which bytes are shown."""


def info(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL | PROFILE]",
            help="A model as for the other commands, or a boost profile (.safetensors).",
            show_default=False,
        ),
    ] = None,
    preset: options.Preset = None,
    bits: options.Bits = None,
    k_bits: options.KBits = None,
    v_bits: options.VBits = None,
    boost: options.Boost = None,
    profile: options.ProfileFile = None,
    memory: Annotated[
        str | None, typer.Option(help="What fits in so much memory, such as 80GB.", show_default=False)
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    report: Annotated[
        Path | None, typer.Option(help="Also write the charts of a profile there: FILE.html.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show what a model's cache costs, without loading weights; or what a boost profile holds."""
    config = cache_config(preset, bits, k_bits, v_bits, boost)
    if model is not None and model.endswith(".safetensors"):
        given = {"--preset": preset, "--bits": bits, "--k-bits": k_bits, "--v-bits": v_bits, "--memory": memory}
        for flag in (name for name, value in {**given, "--profile": profile}.items() if value is not None):
            raise ConfigError(f"{flag} is about a model, {model} is a profile.", f"kitty info MODEL --profile {model}")
        _profile_info(Path(os.path.expanduser(model)), config.boost_ratio, report, as_json)
        return
    if report is not None:
        raise ConfigError("--report shows a profile, this is a model.", "Name a profile: kitty info FILE.safetensors")
    from kitty_runtime.memory import plan_memory
    from kitty_runtime.models.fingerprint import config_sha256
    from kitty_runtime.models.geometry import geometry_of
    from kitty_runtime.models.loading import load_config, resolve_model
    from kitty_runtime.profile_store import find_profile
    from kitty_runtime.profiles import load_profile

    memory_bytes = options.size_in_bytes(memory)
    if memory_bytes is not None and memory_bytes < 2**20:
        raise ConfigError(f"--memory {memory} is {memory_bytes} bytes.", "Write it with its unit, as 80GB or 24GiB.")
    source = resolve_model(model, output.note)
    geometry = geometry_of(load_config(source, trust_remote_code))
    found: tuple[Path | None, BoostProfile | None] = None, None
    if profile is not None:
        found = profile, load_profile(profile)
    elif config.uses_profile:
        found = find_profile(config_sha256(geometry), None) or found
    plan = None if memory_bytes is None else plan_memory(geometry, config, memory_bytes, found[1])
    if as_json:
        output.json_document(_document(source.name, geometry, config, found[1], plan))
    else:
        _show(source.name, shlex.quote(model or "demo"), geometry, config, found, plan)


def _document(
    name: str, geometry: ModelGeometry, config: CacheConfig, profile: BoostProfile | None, plan: MemoryPlan | None
) -> dict[str, Any]:
    from dataclasses import asdict

    from kitty_runtime.memory import sequence_bytes

    at = {n: sequence_bytes(geometry.layers, config, n, profile) for n in CONTEXTS}
    quantized, kept = _layers(geometry, config, profile)
    return {
        "model": name,
        "config": asdict(config),
        "num_parameters": geometry.num_parameters,
        "max_position_embeddings": geometry.max_position_embeddings,
        "bytes_per_token": {str(n): round(b.total / n, 3) for n, b in at.items()},
        "bytes_by_part": {str(n): asdict(b) for n, b in at.items()},
        "ratio": {str(n): round(b.ratio, 4) for n, b in at.items()},
        "layers_quantized": quantized,
        "layers_kept": [{"layer": index, "reason": reason} for index, reason in kept],
        "memory": None if plan is None else asdict(plan),
    }


def _layers(
    geometry: ModelGeometry, config: CacheConfig, profile: BoostProfile | None
) -> tuple[list[int], list[tuple[int, str]]]:
    """Numbers of the paged layers, and of the kept ones with the reason."""
    from kitty_runtime.profiles import layer_boosts

    boosts = layer_boosts(geometry.layers, config, profile)
    paged = [layer.index for layer, boost in zip(geometry.layers, boosts, strict=True) if boost is not None]
    kept = [(x.index, x.reason or "skipped by the profile") for x in geometry.layers if x.index not in paged]
    return paged, kept


def _show(
    name: str,
    argument: str,
    geometry: ModelGeometry,
    config: CacheConfig,
    found: tuple[Path | None, BoostProfile | None],
    plan: MemoryPlan | None,
) -> None:
    from rich import box
    from rich.table import Table

    from kitty_runtime.memory import sequence_bytes

    path, profile = found
    quantized, kept = _layers(geometry, config, profile)
    output.text(f"{name}: {geometry.model_type}, {geometry.num_parameters / 1e6:,.0f}M parameters")
    output.text(
        f"layers: {len(quantized)} of {geometry.num_layers} paged; {geometry.num_q_heads} query heads, "
        f"{geometry.num_kv_heads} KV heads of {geometry.head_dim}"
    )
    for reason in dict.fromkeys(reason for _, reason in kept):
        indices = ", ".join(str(index) for index, r in kept if r == reason)
        output.text(f"kept as they are ({reason}): layers {indices}")
    output.text(f"cache: {describe(config)}")
    if config.uses_profile:
        output.text(f"profile: {path or f'none; make one with: kitty profile {argument}'}")
    parts = ["pages", "sinks", "recent", *(["kept layers"] if kept else [])]
    table = Table("context", *parts, "total", "B/token", "16 bits", "ratio", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for n in CONTEXTS:
        b = sequence_bytes(geometry.layers, config, n, profile)
        sizes = [b.pages, b.sinks, b.rings + b.statistics, *([b.kept_layers] if kept else []), b.total]
        table.add_row(
            f"{n // 1024}K", *map(output.size, sizes), f"{b.total / n:,.0f}", output.size(b.dense), f"{b.ratio:.2f}x"
        )
    output.show(table)
    if geometry.max_position_embeddings and geometry.max_position_embeddings < CONTEXTS[-1]:
        output.text(f"The model was made for contexts up to {geometry.max_position_embeddings} tokens.")
    if plan is not None:
        _show_plan(plan)


def describe(config: CacheConfig) -> str:
    """The settings in one line."""
    if not config.quantizes:
        return "16-bit pages"
    boost = f", {config.boost_ratio:.3g} of the key channels at 4 bits ({config.policy})" if config.boost_ratio else ""
    clipped, rotated = ", clipped" * config.clip_search, ", rotated" * config.v_hadamard
    return (
        f"keys {config.k_bits} bits{boost}{clipped}, values {config.v_bits} bits{rotated}; "
        f"unpacked: first {config.sink_len} tokens, newest {config.k_recent_len} keys and {config.v_recent_len} values"
    )


def _show_plan(plan: MemoryPlan) -> None:
    output.text(
        f"memory {output.size(plan.memory_bytes)}: weights {output.size(plan.weights_bytes)} (16 bits), "
        f"runtime {output.size(plan.runtime_bytes)}, KV cache {output.size(plan.kv_bytes)}"
    )
    if not plan.longest_context:
        need = plan.weights_bytes + plan.runtime_bytes
        output.text(
            f"It does not fit: weights and runtime alone take {output.size(need)}. Use more memory or a smaller model."
        )
        return
    output.text(
        f"KV cache: {plan.num_tokens:,} tokens, {plan.largest_batch} sequences of {plan.batch_seq_len} at once "
        f"(16 bits: {plan.dense_batch}); longest context {plan.longest_context:,}"
    )
    if not plan.largest_batch:
        output.text("Not one such sequence fits. Lower --boost or --bits, or use more memory.")


def _profile_info(path: Path, boost_ratio: float, report: Path | None, as_json: bool) -> None:
    from dataclasses import asdict

    from rich import box
    from rich.table import Table

    from kitty_cli.report.page import check_report_path, write_report
    from kitty_cli.report.profile_page import profile_page
    from kitty_runtime.profiles import load_profile

    check_report_path(report)
    profile = load_profile(path)
    if report is not None:
        write_report(report, profile_page(profile, boost_ratio))
    budgets = profile.budgets(boost_ratio)
    provenance = asdict(profile.provenance)
    if as_json:
        layers = [
            {"layer": index, "num_boosted": budgets[index], "kl": list(layer.kl)}
            for index, layer in profile.layers.items()
        ]
        output.json_document(
            {
                "path": str(path),
                "boost_ratio": boost_ratio,
                "boost_levels": list(profile.boost_levels),
                "provenance": provenance,
                "layers": layers,
            }
        )
        return
    for name, value in provenance.items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        output.text(f"{name}: {shown}")
    table = Table("layer", "boosted", *(f"KL at {level:.3g}" for level in profile.boost_levels), box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.justify = "right"
    for index, layer in profile.layers.items():
        table.add_row(str(index), str(budgets[index]), *(f"{kl:.2e}" for kl in layer.kl))
    output.show(table)
    output.text(f"boosted: channels of each KV head at --boost {boost_ratio:.3g}")
