"""Freed memory serves the next allocation: the kernel clears a page once, not at every pass."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, resource, sys
from kitty_cli.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
malloc, free, memset = (getattr(ctypes.CDLL(None), name) for name in ("malloc", "free", "memset"))
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
for _ in range(8):
    block = malloc(ctypes.c_size_t(64 << 20))
    memset(block, 1, 64 << 20)
    free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def page_faults(mode):
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone has the setting")
def test_freed_blocks_are_kept():
    assert page_faults("keep") < page_faults("give back") / 2
