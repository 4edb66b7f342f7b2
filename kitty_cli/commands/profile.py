"""`kitty profile`: measure a model's key sensitivity and write its boost profile."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kitty_cli import options, output
from kitty_cli.commands.env import versions
from kitty_runtime.config import CacheConfig, Metric
from kitty_runtime.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kitty_cli.profile_report import Comparison
    from kitty_runtime.profiles import BoostProfile

NUM_SAMPLES, MAX_SEQ_LENGTH = 4, 1024
"""Default calibration: enough for stable energies, under a minute on a small model."""

DATA_SPLIT, DATA_COLUMN = "train", "text"

KL_SAMPLES, KL_TOKENS = 2, 640
HELD_OUT_TOKENS = 2048

_CALIBRATION = "Calibration"


def profile(
    model: options.Model = None,
    metric: Annotated[
        Metric,
        typer.Option(
            help="query: rms(q) times key range. magnitude: mean |k|, the paper's heuristic. attention: change of the "
            "attention probabilities, the paper's definition.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = "query",
    data: Annotated[
        str,
        typer.Option(
            help="builtin, a text file, or what datasets.load_dataset takes: NAME or NAME:CONFIG.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = "builtin",
    data_split: Annotated[str, typer.Option(help="Split of a dataset.", rich_help_panel=_CALIBRATION)] = DATA_SPLIT,
    data_column: Annotated[str, typer.Option(help="Column of a dataset.", rich_help_panel=_CALIBRATION)] = DATA_COLUMN,
    tokens: Annotated[
        int | None,
        typer.Option(help="Calibration tokens in all.", rich_help_panel=_CALIBRATION, min=1, show_default=False),
    ] = None,
    num_samples: Annotated[
        int | None,
        typer.Option(
            help=f"Calibration windows; {NUM_SAMPLES} if left out.",
            rich_help_panel=_CALIBRATION,
            min=1,
            show_default=False,
        ),
    ] = None,
    max_seq_length: Annotated[
        int, typer.Option(help="Tokens of a window.", rich_help_panel=_CALIBRATION, min=1)
    ] = MAX_SEQ_LENGTH,
    seed: Annotated[
        int, typer.Option(help="Which windows of the text.", rich_help_panel=_CALIBRATION, min=0, max=2**63 - 1)
    ] = 0,
    skip_layers: Annotated[
        str,
        typer.Option(
            help="Layers to leave at 16 bits, such as 0,1,30.", rich_help_panel=_CALIBRATION, show_default=False
        ),
    ] = "",
    boost: Annotated[float, typer.Option(help="Boost ratio to show budgets for; any can be used later.")] = 0.125,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write; kitty's own folder if left out.")
    ] = None,
    held_out: Annotated[bool, typer.Option(help="Compare with the paper's preset on held-out text.")] = True,
    device: options.Device = "auto",
    dtype: options.DtypeName = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    report: options.Report = None,
    as_json: options.Json = False,
) -> None:
    """Measure key sensitivity per channel and layer, and write a boost profile."""
    from kitty_cli.allocator import keep_freed_memory
    from kitty_cli.profile_report import profile_document, show_profile
    from kitty_cli.report.page import check_report_path, write_report
    from kitty_cli.report.profile_page import profile_page
    from kitty_runtime.models.fingerprint import config_sha256, weights_sha256
    from kitty_runtime.models.geometry import geometry_of
    from kitty_runtime.models.loading import load_config, load_model, load_tokenizer, resolve_model
    from kitty_runtime.models.rope import rope_wavelengths
    from kitty_runtime.profile_store import check_writable, default_path, save_profile
    from kitty_runtime.profiles import Provenance
    from kitty_runtime.sensitivity import measurable_layers, measure_statistics, profile_of
    from kitty_runtime.texts import load_text, token_sha256, tokenize, windows_of

    CacheConfig(boost_ratio=boost)
    check_report_path(report)
    keep_freed_memory()
    skipped = _layer_numbers(skip_layers)
    source = resolve_model(model, output.note)
    geometry = geometry_of(load_config(source, trust_remote_code))
    measurable_layers(geometry.layers, skipped)
    limit = geometry.max_position_embeddings
    samples, window_len = _window_shape(tokens, num_samples, min(max_seq_length, limit or max_seq_length))
    if window_len < max_seq_length and tokens is None:
        output.warning(f"{source.name} reads {limit} tokens; windows are cut to {window_len}.")
    path = out or default_path(source.name)
    check_writable(path)
    tokenizer = load_tokenizer(source, trust_remote_code)
    text = load_text(data, data_split, data_column)
    windows = windows_of(text, tokenize(text, tokenizer), samples + KL_SAMPLES, window_len, seed)
    windows, kl_windows = windows[:samples], [window[:KL_TOKENS] for window in windows[samples:]]
    output.note(f"{source.name}: {samples} x {window_len} tokens of {text.name}, metric {metric}")
    loaded = load_model(
        source, dtype=dtype, device=device, trust_remote_code=trust_remote_code, attn_implementation="kitty"
    )
    found = versions()
    provenance = Provenance(
        model=source.name,
        model_revision=source.revision or "",
        config_sha256=config_sha256(geometry),
        weights_sha256=weights_sha256(loaded),
        metric=metric,
        data=text.name,
        token_sha256=token_sha256([*windows, *kl_windows]),
        num_tokens=samples * window_len,
        kl_tokens=sum(len(window) for window in kl_windows),
        seed=seed,
        command=_command(
            model or "demo", metric, data, data_split, data_column, samples, window_len, seed, skip_layers
        ),
        versions={name: found[name] for name in ("kitty", "python", "torch", "transformers")},
    )
    with output.progress() as progress:
        statistics = measure_statistics(loaded, windows, metric, skipped, progress)
        measured = profile_of(loaded, statistics, kl_windows, provenance, progress)
        save_profile(measured, path)
        compared = _compare(loaded, tokenizer, measured, boost) if held_out else None
    if report is not None:
        errors = {index: layer.key_errors for index, layer in statistics.items()}
        waves = rope_wavelengths(loaded, geometry.head_dim)
        write_report(report, profile_page(measured, boost, compared, errors, waves))
    if as_json:
        output.json_document(profile_document(measured, path, boost, compared))
    else:
        show_profile(measured, path, boost, compared)


def _window_shape(tokens: int | None, num_samples: int | None, window_len: int) -> tuple[int, int]:
    """How many windows of how many tokens; --tokens are shared out over windows of `window_len` at the most.

    Raises:
        ConfigError: windows too short to measure each layer's KL, or two answers to one question.
    """
    from kitty_runtime.emulation import FIRST_SCORED

    if tokens is not None and num_samples is not None:
        raise ConfigError("--tokens and --num-samples say the same thing twice.", "Give one of them.")
    if tokens is not None:
        window_len = min(window_len, tokens)
        num_samples = tokens // window_len
    if window_len < FIRST_SCORED + 2:
        raise ConfigError(
            f"Windows of {window_len} tokens are too short: hardly anything is packed before token {FIRST_SCORED}.",
            f"Use {FIRST_SCORED + 2} tokens or more, and a model that reads as many.",
        )
    return NUM_SAMPLES if num_samples is None else num_samples, window_len


def _layer_numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise ConfigError(f"--skip-layers is {text!r}.", "Write layer numbers with commas: 0,1,30.") from None


def _command(
    model: str,
    metric: Metric,
    data: str,
    data_split: str,
    data_column: str,
    num_samples: int,
    max_seq_length: int,
    seed: int,
    skip_layers: str,
) -> str:
    """The command that repeats the measurement, every setting spelled out but a dataset's usual split and column."""
    words = ["kitty", "profile", model, "--metric", metric, "--data", data]
    words += ["--data-split", data_split] if data_split != DATA_SPLIT else []
    words += ["--data-column", data_column] if data_column != DATA_COLUMN else []
    words += ["--num-samples", str(num_samples), "--max-seq-length", str(max_seq_length), "--seed", str(seed)]
    return shlex.join(words + (["--skip-layers", skip_layers] if skip_layers else []))


def _compare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, profile: BoostProfile, boost: float
) -> Comparison:
    """The paper's preset and the default preset with this profile, on text that was not used to measure it."""
    from dataclasses import replace

    from kitty_cli.profile_report import Comparison
    from kitty_runtime.accuracy import Method, measure_divergence
    from kitty_runtime.config import DEFAULT_PRESET, preset
    from kitty_runtime.memory import sequence_bytes
    from kitty_runtime.models.geometry import layers_of
    from kitty_runtime.texts import held_out_text, tokenize, windows_of

    text = held_out_text()
    limit = model.config.get_text_config(decoder=True).max_position_embeddings
    window_len = min(HELD_OUT_TOKENS, limit)
    windows = windows_of(text, tokenize(text, tokenizer), 1, window_len)
    methods = {
        "kitty": Method(replace(preset("kitty"), boost_ratio=boost)),
        "this profile": Method(replace(preset(DEFAULT_PRESET), boost_ratio=boost), profile),
    }
    layers = layers_of(model.config)
    return Comparison(
        text=text.name,
        num_tokens=window_len,
        divergences=measure_divergence(model, windows, methods),
        bytes_per_token={
            name: sequence_bytes(layers, m.config, window_len, m.profile).total / window_len
            for name, m in methods.items()
        },
    )
