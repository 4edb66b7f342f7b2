"""Methods as they are written on a command line: NAME or NAME:setting=value:..., and the same in reverse."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from kitty_runtime.config import DEFAULT_PRESET, PRESETS, CacheConfig
from kitty_runtime.errors import ConfigError

if TYPE_CHECKING:
    from kitty_runtime.peers import Peer

SETTINGS = {
    field.name: type(field.default)
    for field in fields(CacheConfig)
    if field.name != "prefill"  # a check always reads what decode would
}


def parse_methods(text: str) -> dict[str, CacheConfig | Peer]:
    """Methods separated by commas, by name.

    Args:
        text: presets, peers (`kitty_runtime.peers.PEERS`) and presets with settings, such as
            ``kitty,fp8,weighted:boost_ratio=0.25:k_recent_len=128:v_recent_len=128``.
    Raises:
        ConfigError: an unknown name or setting, a value of the wrong type, or a method given twice.
    """
    found: dict[str, CacheConfig | Peer] = {}
    for spec in (part.strip() for part in text.split(",")):
        method = parse_method(spec)
        name = method_name(method, spec.partition(":")[0])
        if name in found:
            raise ConfigError(f"--methods names {name} twice.", "Name each method once.")
        found[name] = method
    return found


def parse_method(spec: str) -> CacheConfig | Peer:
    """One method. Raises: as `parse_methods`."""
    from kitty_runtime.peers import PEERS

    name, *settings = spec.split(":")
    if name in PEERS:
        if settings:
            raise ConfigError(f"{name} is emulated as it is and takes no settings: {spec}", f"Write {name} alone.")
        return PEERS[name]
    if name not in PRESETS:
        raise ConfigError(f"There is no method {name!r}.", f"Use {', '.join((*PRESETS, *PEERS))}.")
    changes = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in SETTINGS:
            raise ConfigError(
                f"{setting!r} in {spec!r} is no setting.", f"Write key=value with a key of {', '.join(SETTINGS)}."
            )
        if key in changes:
            raise ConfigError(f"{spec!r} sets {key} twice.", "Set it once.")
        changes[key] = _parse_value(value, SETTINGS[key], setting)
    return replace(PRESETS[name], **changes)


def method_name(method: CacheConfig | Peer, base: str = DEFAULT_PRESET) -> str:
    """What a method is called in a report, which `parse_method` reads back: the preset that it is, or `base` and the
    settings that differ from it."""
    if not isinstance(method, CacheConfig):
        return method.name
    for name, config in PRESETS.items():
        if config == method:
            return name
    return ":".join([base, *_changes(PRESETS[base], method)])


def _changes(preset: CacheConfig, config: CacheConfig) -> list[str]:
    values = ((key, getattr(preset, key), getattr(config, key)) for key in SETTINGS)
    return [f"{key}={str(new).lower() if isinstance(new, bool) else new}" for key, old, new in values if new != old]


def _parse_value(text: str, kind: type, setting: str) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        words = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise ConfigError(
            f"{setting!r}: the value is not {words}.", f"Write {setting.partition('=')[0]}=VALUE."
        ) from None
