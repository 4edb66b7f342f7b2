"""How the C library's allocator treats the large blocks of a measuring command."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let freed blocks serve the next allocation instead of going back to the system; glibc alone has the setting.

    Measuring allocates the same large tensors pass after pass. By default glibc maps each anew and the kernel clears
    its pages, which was 15 % of the CPU time of `kitty profile` on the demo model.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    # Older releases take at most half a heap, 32 MiB.
    if not mallopt(_M_MMAP_THRESHOLD, 2**30):
        mallopt(_M_MMAP_THRESHOLD, 2**25)
