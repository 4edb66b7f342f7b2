"""Options that several commands share, and what they mean together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kitty_runtime.config import DEFAULT_PRESET, PRESETS
from kitty_runtime.errors import ConfigError
from kitty_runtime.models.preflight import Dtype

_MODEL = "Model"
_CACHE = "Cache"
SAMPLING = "Sampling (default: the model's own)"

Model = Annotated[
    str | None,
    typer.Argument(
        help="Hub id, folder, .gguf file, or 'demo'; $KITTY_MODEL or 'demo' if left out.", show_default=False
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Hub id, folder, .gguf file, or 'demo'; $KITTY_MODEL or 'demo' if left out.",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_MODEL)]
DtypeName = Annotated[
    Dtype, typer.Option(help="auto, float32, float16 or bfloat16; auto is float32 on a CPU.", rich_help_panel=_MODEL)
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code from the model's repository.", rich_help_panel=_MODEL)
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile/--no-compile",
        help="Compile the model's layers for decode steps, on CUDA: faster steps, a slower start.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]

Preset = Annotated[
    str | None,
    typer.Option(help=f"Cache settings, {DEFAULT_PRESET} if left out: {', '.join(PRESETS)}.", rich_help_panel=_CACHE),
]
Bits = Annotated[int | None, typer.Option(help="Bits of keys and values: 2, 4 or 16.", rich_help_panel=_CACHE)]
KBits = Annotated[int | None, typer.Option("--k-bits", "-ctk", help="Bits of keys: 2 or 4.", rich_help_panel=_CACHE)]
VBits = Annotated[int | None, typer.Option("--v-bits", "-ctv", help="Bits of values: 2 or 4.", rich_help_panel=_CACHE)]
Boost = Annotated[
    float | None,
    typer.Option(help="Share of key channels at 4 bits, 0 to 1; the mean over layers.", rich_help_panel=_CACHE),
]
Report = Annotated[
    Path | None, typer.Option(help="Also write charts and figures there: FILE.html.", show_default=False)
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", help="Boost profile; the model's own is found by itself.", rich_help_panel=_CACHE),
]


def _sampling(text: str, **limits: Any) -> Any:
    """An option that leaves the model's own generation config alone when it is not given."""
    return typer.Option(help=text, rich_help_panel=SAMPLING, show_default=False, **limits)


Temperature = Annotated[float | None, _sampling("Randomness; 0 is greedy.", min=0.0)]
TopP = Annotated[float | None, _sampling("Keep the likeliest tokens up to this mass.", min=0.0, max=1.0)]
TopK = Annotated[int | None, _sampling("Keep this many of the likeliest tokens.", min=0)]
MinP = Annotated[float | None, _sampling("Drop tokens below this share of the likeliest.", min=0.0, max=1.0)]
RepetitionPenalty = Annotated[float | None, _sampling("Above 1, repeat less.", min=0.01)]


def check_sampling(asked: Mapping[str, Any]) -> None:
    """
    Args:
        asked: values by the names of `SamplingParams`; None = not given.
    Raises:
        ConfigError: a value that nothing could be answered with.
    """
    from kitty_runtime.engine.request import SamplingParams

    temperature = asked["temperature"]
    if temperature is not None and not math.isfinite(temperature):
        raise ConfigError(f"--temperature is {temperature}.", "Use a number, such as 0.7.")
    SamplingParams(**{name: value for name, value in asked.items() if value is not None})


def size_in_bytes(text: str | None) -> int | None:
    """Bytes of a size such as ``80GB``; None if there is none.

    Raises:
        ConfigError: not a size.
    """
    if text is None:
        return None
    from kitty_runtime.memory import parse_bytes

    return parse_bytes(text)
