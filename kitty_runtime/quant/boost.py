"""Which key channels get 4 bits: the scores and the choice.

Source: Kitty, section 3 (dynamic channel-wise precision boost).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kitty_runtime.config import Policy


def magnitude_score(keys: Tensor) -> Tensor:
    """Mean absolute key per channel, the paper's score.

    Args:
        keys: float ``[..., page_size, head_dim]``, after RoPE.
    Returns:
        fp32 ``[..., head_dim]``.
    Source: Kitty, section 3.2.
    """
    return keys.float().abs().mean(-2)


def query_score(keys: Tensor, query_energy: Tensor) -> Tensor:
    """Range of the key channel times how strongly queries read it.

    A channel's rounding error is proportional to its range, and reaches the logits multiplied by the query.

    Args:
        keys: float ``[..., page_size, head_dim]``, after RoPE.
        query_energy: fp32 ``[..., head_dim]``, rms of the queries of the GQA group, after RoPE.
    Returns:
        fp32 ``[..., head_dim]``.
    """
    keys = keys.float()
    return (keys.amax(-2) - keys.amin(-2)) * query_energy


def group_mean_sq(query: Tensor, num_kv_heads: int) -> Tensor:
    """Mean squared query of each GQA group, of which query energies are made.

    Args:
        query: ``[num_seqs, num_q_heads, n, head_dim]``, after RoPE.
    Returns:
        fp32 or wider ``[num_seqs, num_kv_heads, n, head_dim]``.
    """
    groups = query.unflatten(1, (num_kv_heads, -1))
    mean_sq: Tensor = groups.to(torch.promote_types(query.dtype, torch.float32)).square().mean(2)
    return mean_sq


def choose_boosted(scores: Tensor, num_boosted: int) -> Tensor:
    """The `num_boosted` best channels, in ascending order; of equals, the lower channel wins.

    Args:
        scores: ``[..., head_dim]``.
    Returns:
        int64 ``[..., num_boosted]``.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[..., :num_boosted].sort(-1).values


def random_channels(num_kv_heads: int, head_dim: int, num_boosted: int, seed: int) -> Tensor:
    """Fixed random channels per KV head, the paper's control. int64 ``[num_kv_heads, num_boosted]``."""
    generator = torch.Generator().manual_seed(seed)
    return choose_boosted(torch.rand(num_kv_heads, head_dim, generator=generator), num_boosted)


@dataclass(frozen=True)
class LayerBoost:
    """How one layer chooses its boosted channels.

    Attributes:
        policy: see `kitty_runtime.config.CacheConfig`.
        num_boosted: channels per KV head.
        query_energy: fp32 ``[num_kv_heads, head_dim]`` for ``weighted``; None uses the running energy.
        channels: int64 ``[num_kv_heads, num_boosted]``, ascending, for ``static`` and ``random``.
    """

    policy: Policy
    num_boosted: int
    query_energy: Tensor | None = None
    channels: Tensor | None = None

    @property
    def needs_running_energy(self) -> bool:
        return self.policy == "weighted" and self.query_energy is None and self.num_boosted > 0

    def choose(self, keys: Tensor, running_energy: Tensor | None) -> Tensor:
        """The boosted channels of pages.

        Args:
            keys: float ``[num_pages, num_kv_heads, 128, head_dim]``, after RoPE.
            running_energy: ``[num_pages, num_kv_heads, head_dim]``, rms of the queries up to the moment each page
                is packed; used when `needs_running_energy`.
        Returns:
            int64 ``[num_pages, num_kv_heads, num_boosted]``, ascending.
        """
        num_pages, num_kv_heads, _, head_dim = keys.shape
        if self.channels is not None:
            return self.channels.to(keys.device).expand(num_pages, -1, -1)
        if self.num_boosted == head_dim:
            return torch.arange(head_dim, device=keys.device).expand(num_pages, num_kv_heads, -1)
        if self.policy == "dynamic":
            return choose_boosted(magnitude_score(keys), self.num_boosted)
        energy = running_energy if self.query_energy is None else self.query_energy.to(keys.device)
        if energy is None:  # nothing to choose
            return torch.empty((num_pages, num_kv_heads, 0), dtype=torch.int64, device=keys.device)
        return choose_boosted(query_score(keys, energy), self.num_boosted)
