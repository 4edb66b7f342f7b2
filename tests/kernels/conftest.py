"""Kernel tests run on CUDA where there is a device, else in the Triton interpreter (set in tests/conftest.py)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A gpu test that is asked for by name on a machine without a GPU is skipped."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
