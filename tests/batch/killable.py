"""`kitty batch` with the fake engine, as a process of its own: ``killable.py STEP_S ARGUMENTS``."""

from __future__ import annotations

import sys
from typing import Any

from fake_engine import FakeEngine, fake_model

from kitty_cli.commands import batch
from kitty_cli.main import main
from kitty_runtime.batch.requests import BatchModel
from kitty_runtime.batch.run import Engine


def _open(where: Any, asked: Any, seed: Any, flags: Any) -> tuple[Engine, BatchModel]:
    return FakeEngine(max_num_seqs=flags.max_num_seqs, step_s=STEP_S), fake_model()


STEP_S = float(sys.argv.pop(1))
batch._open = _open
main()
