"""What the engine may take: memory, batch sizes, and how it runs its steps. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from kitty_runtime.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What the engine may take.

    Attributes:
        gpu_memory_utilization: share of the GPU's memory for weights, cache and all else.
        kv_bytes: bytes of the cache instead.
        num_pages: pages of the pool instead, beside `max_num_seqs` slots.
        max_num_seqs: sequences stored at once; fewer if the memory is small.
        max_batch_tokens: tokens that a step reads at the most.
        max_model_len: longest sequence in tokens; None = what the model was made for.
        capture: replay decode steps as CUDA graphs.
        compiled: with the model's layers compiled: steps are a fifth faster, the first ones take many seconds.
        run_ahead: launch a step before the tokens of the one before are read, so that the device never waits for the
            host; None = on CUDA.
    """

    gpu_memory_utilization: float = 0.9
    kv_bytes: int | None = None
    num_pages: int | None = None
    max_num_seqs: int = 256
    max_batch_tokens: int = 2048
    max_model_len: int | None = None
    capture: bool = True
    compiled: bool = False
    run_ahead: bool | None = None

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}.", "Use a share above 0, up to 1."
            )
        for name in ("max_num_seqs", "max_batch_tokens", "kv_bytes", "num_pages", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}.", "Use 1 or more.")
