"""How decode attention shares its work out among programs, computed on the device from the lengths.

The units of all sequences stand in a row and every program takes an equal stretch, which may end in one sequence and
begin in the next: no program has more to do than another, whatever the lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = tl.constexpr(16)
"""Unpacked tokens per unit of work."""
PAGE = tl.constexpr(128)
MIXED_UNITS = tl.constexpr(4)
"""Work of the page whose keys are packed and whose values are not, in units."""


@triton.jit
def units_of(length, SINK_LEN: tl.constexpr, K_RECENT: tl.constexpr, V_RECENT: tl.constexpr, DENSE: tl.constexpr):
    """Work of a sequence, and where it lies: packed pages of keys and values, tiles of sink and ring."""
    past_sink = length - 1 - SINK_LEN
    k_pages = tl.maximum(past_sink - K_RECENT, 0) // PAGE
    v_pages = tl.maximum(past_sink - V_RECENT, 0) // PAGE
    sink_tiles = tl.cdiv(tl.minimum(length, SINK_LEN), TILE)
    ring_tiles = tl.cdiv(tl.maximum(length - SINK_LEN - k_pages * PAGE, 0), TILE)
    tail = sink_tiles + ring_tiles
    units = tail + (k_pages * (PAGE // TILE) if DENSE else v_pages + (k_pages - v_pages) * MIXED_UNITS)
    return units, k_pages, v_pages, sink_tiles


@triton.jit
def all_units(
    seq_lens,
    num_seqs,
    SEQS: tl.constexpr,
    SINK_LEN: tl.constexpr,
    K_RECENT: tl.constexpr,
    V_RECENT: tl.constexpr,
    DENSE: tl.constexpr,
):
    """Sequence numbers and the work of each, [SEQS]; zero where there is no sequence."""
    row = tl.arange(0, SEQS)
    lengths = tl.load(seq_lens + row, mask=row < num_seqs, other=1)
    units, _, _, _ = units_of(lengths, SINK_LEN, K_RECENT, V_RECENT, DENSE)
    return row, tl.where(row < num_seqs, units, 0)


@triton.jit
def first_unit(program, total, programs):
    """Where a program's share of `total` units begins; all shares are equal to within one unit."""
    return (program.to(tl.int64) * total // programs).to(tl.int32)


@triton.jit
def program_of(unit, total, programs):
    """Which program's share a unit is in: the inverse of `first_unit`."""
    return (((unit + 1).to(tl.int64) * programs - 1) // total).to(tl.int32)
