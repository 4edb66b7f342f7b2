"""Kernel tests run on CUDA where there is a device, else in Triton's interpreter, which tests/conftest.py asks for."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A gpu test that is asked for where there is no GPU is skipped."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN: what kernels leave unwritten, or read unwritten, shows."""

    def poisoned(allocate):
        def allocate_poison(*args, **kwargs):
            out = allocate(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return allocate_poison

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
