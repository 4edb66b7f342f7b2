"""`kitty check`: how far methods move a model's predictions from those at 16 bits, for people and as a gate."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kitty_cli import check_inputs as inputs
from kitty_cli import options, output
from kitty_cli.commands.env import backend, versions
from kitty_cli.open_model import profile_for
from kitty_runtime.config import CacheConfig
from kitty_runtime.gate import Limits, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from kitty_cli.check_report import Loaded, Setting
    from kitty_runtime.accuracy import Method
    from kitty_runtime.check import Check
    from kitty_runtime.models.geometry import ModelGeometry
    from kitty_runtime.models.loading import ModelSource
    from kitty_runtime.peers import Peer
    from kitty_runtime.profiles import BoostProfile

GATE_FAILED = 3
"""Exit code."""

Format = Literal["table", "json", "md"]

DATA_SPLIT, DATA_COLUMN = "test", "text"

_TEXT, _GATE = "Text", "Gate: exit code 3 if it fails"


def _limit(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel=_GATE, show_default=False)


def check(
    model: options.Model = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Presets, or kivi-2-g32, fp8, q4_0 (emulated for comparison), or PRESET:key=value:..., with commas; "
            f"{inputs.METHODS.replace(',', ', ')} if no cache option is given either.",
            show_default=False,
        ),
    ] = None,
    preset: options.Preset = None,
    bits: options.Bits = None,
    k_bits: options.KBits = None,
    v_bits: options.VBits = None,
    boost: options.Boost = None,
    profile: options.ProfileFile = None,
    data: Annotated[
        str,
        typer.Option(
            help="builtin (manual pages), source (Python code), a text file, or NAME or NAME:CONFIG of a dataset.",
            rich_help_panel=_TEXT,
        ),
    ] = "builtin",
    data_split: Annotated[str, typer.Option(help="Split of a dataset.", rich_help_panel=_TEXT)] = DATA_SPLIT,
    data_column: Annotated[str, typer.Option(help="Column of a dataset.", rich_help_panel=_TEXT)] = DATA_COLUMN,
    windows: Annotated[
        int | None,
        typer.Option(
            help=f"Stretches of text; {inputs.NUM_WINDOWS} if left out.",
            rich_help_panel=_TEXT,
            min=1,
            show_default=False,
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of each; {inputs.SEQ_LEN} if left out.", rich_help_panel=_TEXT, min=1, show_default=False
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help=f"{inputs.FULL_WINDOWS} x {inputs.FULL_SEQ_LEN} tokens.", rich_help_panel=_TEXT),
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Which stretches of the text.", rich_help_panel=_TEXT, min=0, max=2**63 - 1)
    ] = 0,
    needle: Annotated[bool, typer.Option("--needle", help="Also ask for numbers hidden in the text.")] = False,
    max_kl: Annotated[float | None, _limit("Highest mean KL, in nats.")] = None,
    min_same_top1: Annotated[float | None, _limit("Lowest share of equal most likely tokens, 0 to 1.")] = None,
    max_ppl_ratio: Annotated[float | None, _limit("Highest perplexity, over that at 16 bits.")] = None,
    max_bytes_per_token: Annotated[
        float | None, _limit("Most bytes. Of several methods one must hold all limits; the cheapest is named.")
    ] = None,
    baseline: Annotated[Path | None, _limit("Report that no method may be worse than.")] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            help="Share of the baseline's KL to allow, for other CPUs.", rich_help_panel=_GATE, min=0.0, max=1.0
        ),
    ] = 0.0,
    write_baseline: Annotated[Path | None, _limit("Write the report there unless the gate fails.")] = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the report.")] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    report: options.Report = None,
    device: options.Device = "auto",
    dtype: options.DtypeName = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Measure cache methods against 16 bits on the same text; with limits or a baseline, gate on them."""
    from kitty_cli.allocator import keep_freed_memory
    from kitty_cli.check_gate import early_identity, open_gate
    from kitty_cli.check_report import check_document
    from kitty_cli.report.check_page import check_page
    from kitty_cli.report.page import check_report_path, write_report
    from kitty_runtime.check import run_check
    from kitty_runtime.models.geometry import geometry_of
    from kitty_runtime.models.loading import load_config, load_model, load_tokenizer, resolve_model
    from kitty_runtime.needle import needle_cases
    from kitty_runtime.profiles import load_profile
    from kitty_runtime.texts import load_check_text

    limits = Limits(max_kl, min_same_top1, max_ppl_ratio, max_bytes_per_token)
    gate = open_gate(limits, baseline, tolerance, write_baseline)
    check_report_path(report)
    chosen = inputs.chosen_methods(methods, preset, bits, k_bits, v_bits, boost)
    given = None if profile is None else load_profile(profile)
    keep_freed_memory()
    source = resolve_model(model, output.note)
    geometry = geometry_of(load_config(source, trust_remote_code))
    shape = inputs.window_shape(windows, seq_len, full, source.name, geometry.max_position_embeddings)
    inputs.check_methods(geometry, chosen, given, gate.wanted, shape[1])
    tokenizer = load_tokenizer(source, trust_remote_code)
    text = load_check_text(data, data_split, data_column)
    stretches = inputs.text_windows(text, tokenizer, *shape, seed)
    needles = needle_cases(tokenizer, stretches[0], seed=seed) if needle else []
    extra = _extra_words(data, data_split, data_column, profile, needle, device, dtype)
    command = _command(model or "demo", list(chosen), shape, seed, extra)
    setting = _setting(source, geometry, text.name, stretches, command)
    gate.compare(early_identity(setting), _configs(inputs.with_profile(chosen, None)))
    output.note(f"{source.name}: {shape[0]} x {shape[1]} tokens of {text.name}; {', '.join(chosen)}")
    loaded = load_model(
        source, dtype=dtype, device=device, trust_remote_code=trust_remote_code, attn_implementation="kitty"
    )
    where = _loaded(loaded)
    output.note(f"on {where.device}, {where.dtype}; backend: {where.backend}")
    found_profile = _profile(loaded, geometry, chosen, given, profile, text.name)
    measured = inputs.with_profile(chosen, found_profile)
    gate.compare({"weights": where.weights_sha256, "dtype": where.dtype}, _configs(measured))
    gate.note_differences(_configs(measured), shape[0])
    with output.progress() as progress:
        check = run_check(loaded, stretches, measured, needles, progress)
    verdict = gate.judge(check)
    document = check_document(setting, where, check, verdict)
    if report is not None:
        write_report(report, check_page(setting, where, check, verdict))
    if verdict.passed is not False:
        gate.write(document)  # before the report is printed: whoever reads that may leave early
    try:
        _show("json" if as_json else output_format, document, setting, check, verdict)
    except BrokenPipeError:
        if verdict.passed is not False:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the gate has failed all the same
    if verdict.passed is False:
        output.note("The gate failed.")
        raise typer.Exit(GATE_FAILED)


def _show(form: Format, document: dict[str, Any], setting: Setting, check: Check, verdict: Verdict) -> None:
    """Print the report; `document` is its JSON form."""
    from kitty_cli.check_report import markdown, show_check

    if form == "json":
        output.json_document(document)
    elif form == "md":
        output.text("\n".join(markdown(setting, check, verdict)))
    else:
        show_check(setting, check, verdict)


def _setting(
    source: ModelSource, geometry: ModelGeometry, data_name: str, stretches: list[Any], command: str
) -> Setting:
    from kitty_cli.check_report import Setting
    from kitty_runtime.emulation import FIRST_SCORED
    from kitty_runtime.models.fingerprint import config_sha256
    from kitty_runtime.texts import token_sha256

    return Setting(
        model_id=source.name,
        revision=source.revision or "",
        config_sha256=config_sha256(geometry),
        data_name=data_name,
        token_sha256=token_sha256(stretches),
        num_windows=len(stretches),
        seq_len=len(stretches[0]),
        score_from=FIRST_SCORED,
        versions=versions(),
        command=command,
    )


def _loaded(model: PreTrainedModel) -> Loaded:
    from kitty_cli.check_report import Loaded
    from kitty_runtime.models.fingerprint import weights_sha256

    return Loaded(
        weights_sha256=weights_sha256(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        backend=backend(model.device.type, model.dtype),
    )


def _profile(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    methods: Mapping[str, CacheConfig | Peer],
    given: BoostProfile | None,
    given_path: Path | None,
    data_name: str,
) -> BoostProfile | None:
    """The profile of the methods that use one; says which on stderr, and warns where it makes the figures too good."""
    if not any(isinstance(method, CacheConfig) and method.uses_profile for method in methods.values()):
        if given is not None:
            output.warning("No method uses the profile; add weighted to --methods.")
        return None
    profile, name = profile_for(model, geometry, given, given_path)
    output.note(f"profile: {name}")
    if profile is not None and profile.provenance.data == data_name:
        output.warning(f"The profile was measured on {data_name} too: its figures may be too good.")
    return profile


def _configs(methods: Mapping[str, Method | Peer]) -> dict[str, dict[str, Any]]:
    """Settings by name, of the methods that kitty can run."""
    from kitty_cli.check_report import config_document
    from kitty_runtime.accuracy import Method

    return {name: config_document(method) for name, method in methods.items() if isinstance(method, Method)}


def _extra_words(
    data: str, data_split: str, data_column: str, profile: Path | None, needle: bool, device: str, dtype: str
) -> list[str]:
    """The part of the command that is usually left out."""
    words = ["--data", data]
    for option, value, usual in (
        ("--data-split", data_split, DATA_SPLIT),
        ("--data-column", data_column, DATA_COLUMN),
        ("--profile", None if profile is None else str(profile), None),
        ("--device", device, "auto"),
        ("--dtype", dtype, "auto"),
    ):
        if value is not None and value != usual:
            words += [option, value]
    return words + (["--needle"] if needle else [])


def _command(model: str, methods: list[str], shape: tuple[int, int], seed: int, extra: list[str]) -> str:
    """The command that repeats the measurement, gate aside."""
    words = ["kitty", "check", model, "--methods", ",".join(methods), *extra]
    return shlex.join([*words, "--windows", str(shape[0]), "--seq-len", str(shape[1]), "--seed", str(seed)])
