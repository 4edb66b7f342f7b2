"""Median device times by graph replay, and the ceilings that they are held against, in the same run."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton


def microseconds(run: Callable[[], object], rep: int = 30) -> float:
    """Median time of one call on the device; `run` is captured once and replayed for `rep` ms."""
    return float(triton.testing.do_bench_cudagraph(run, rep=rep, return_mode="median")) * 1e3


def read_bandwidth() -> float:
    """GB/s at which a plain sum reads a gigabyte."""
    x = torch.randn(1 << 29, device="cuda", dtype=torch.float16)
    return x.nbytes / microseconds(x.sum) / 1e3


def sdpa_microseconds(
    batch: int, context: int, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> float:
    """PyTorch's attention for one query per sequence, the better of its two usual layouts of keys and values."""
    query = torch.randn(batch, num_q_heads, 1, head_dim, device="cuda", dtype=dtype)
    best = float("inf")
    for heads_first in (True, False):
        shape = (batch, num_kv_heads, context, head_dim) if heads_first else (batch, context, num_kv_heads, head_dim)
        keys, values = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
        if not heads_first:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)

        def attend(keys: torch.Tensor = keys, values: torch.Tensor = values) -> torch.Tensor:
            return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        best = min(best, microseconds(attend))
    return best


def flash_attention_microseconds(
    batch: int, context: int, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> float | None:
    """flash-attn's decode kernel, best of a few split counts; None where it is not installed."""
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    query = torch.randn(batch, 1, num_q_heads, head_dim, device="cuda", dtype=dtype)
    keys, values = (torch.randn(batch, context, num_kv_heads, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    return min(
        microseconds(lambda n=n: flash_attn_with_kvcache(query, keys, values, num_splits=n))  # type: ignore[misc]
        for n in (0, 4, 16)
    )


def flashinfer_microseconds(
    batch: int, context: int, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> float | None:
    """FlashInfer's paged decode at 16 bits, pages of 16 tokens; None where it is not installed."""
    try:
        import flashinfer
    except ImportError:
        return None
    page, pages = 16, context // 16
    query = torch.randn(batch, num_q_heads, head_dim, device="cuda", dtype=dtype)
    cache = torch.randn(batch * pages, 2, page, num_kv_heads, head_dim, device="cuda", dtype=dtype)
    first = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * pages
    ids = torch.randperm(batch * pages, device="cuda").int()
    last_page_len = torch.full((batch,), page, device="cuda", dtype=torch.int32)
    best = float("inf")
    for use_tensor_cores in (False, True):
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=use_tensor_cores)
        wrapper.plan(first, ids, last_page_len, num_q_heads, num_kv_heads, head_dim, page, q_data_type=dtype)
        best = min(best, microseconds(lambda wrapper=wrapper: wrapper.run(query, cache)))  # type: ignore[misc]
    return best
