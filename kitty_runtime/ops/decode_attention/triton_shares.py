"""How decode attention shares its work out among programs, computed on the device from the lengths.

Work is counted in units, about the time of 16 unpacked tokens. The units of all sequences stand in a row and every
program takes an equal stretch, which may end in one sequence and begin in the next: no program has more to do than
another, whatever the lengths. A page or a tile belongs to the program in whose stretch its first unit is.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAGE = tl.constexpr(128)
TILE = tl.constexpr(16)
"""Unpacked tokens read at a time: one unit of work."""
START_UNITS = tl.constexpr(1)
"""Work of beginning a sequence."""
PAGE_UNITS = tl.constexpr(3)
"""Work of a packed page."""
MIXED_UNITS = tl.constexpr(6)
"""Work of the page whose keys are packed and whose values are not."""


@triton.jit
def contents_of(length, SINK_LEN: tl.constexpr, K_RECENT: tl.constexpr, V_RECENT: tl.constexpr):
    """What a sequence holds: packed pages of keys, of values, tiles of the sink, tiles of sink and ring."""
    past_sink = length - 1 - SINK_LEN
    k_pages = tl.maximum(past_sink - K_RECENT, 0) // PAGE
    v_pages = tl.maximum(past_sink - V_RECENT, 0) // PAGE
    sink_tiles = tl.cdiv(tl.minimum(length, SINK_LEN), TILE)
    ring_tiles = tl.cdiv(tl.maximum(length - SINK_LEN - k_pages * PAGE, 0), TILE)
    return k_pages, v_pages, sink_tiles, sink_tiles + ring_tiles


@triton.jit
def page_units(k_pages, v_pages, DENSE: tl.constexpr):
    """Units before a sequence's first unpacked tile, or at 16 bits before its first tile of all."""
    return START_UNITS + (0 if DENSE else v_pages * PAGE_UNITS + (k_pages - v_pages) * MIXED_UNITS)


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
    k_pages, v_pages, _, tiles = contents_of(lengths, SINK_LEN, K_RECENT, V_RECENT)
    units = page_units(k_pages, v_pages, DENSE) + tiles + (k_pages * (PAGE // TILE) if DENSE else 0)
    return row, tl.where(row < num_seqs, units, 0)


@triton.jit
def first_unit(program, total, programs):
    """Where a program's share of `total` units begins; all shares are equal to within one unit.

    32 bits do: two billion units over programs are more tokens than a GPU holds.
    """
    return program * total // programs


@triton.jit
def program_of(unit, total, programs):
    """Which program's share a unit is in: the inverse of `first_unit`."""
    return ((unit + 1) * programs - 1) // total
