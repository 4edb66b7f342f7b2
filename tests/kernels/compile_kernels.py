"""Run by test_cubins.py in a process of its own: compiles the launches of the kernels for a GPU that need not be there.

The launchers run on CPU tensors with the kernels replaced by recorders, so that a launch is compiled with the arguments
that it really has. Prints JSON: per kernel what ``cuobjdump -res-usage`` says of it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_case import BF16, F16, random_batch, random_state, random_tokens
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kitty_runtime.config import Windows
from kitty_runtime.ops.decode_attention import triton as decode
from kitty_runtime.ops.extend_attention import triton as extend
from kitty_runtime.ops.operands import SoftmaxSpec
from kitty_runtime.ops.quantize_page import triton as quantize
from kitty_runtime.ops.rotate_values import triton as rotate
from kitty_runtime.ops.store_tokens import triton as store
from kitty_runtime.quant.boost import LayerBoost
from kitty_runtime.quant.packing import PageLayout

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl", "maxnreg")
POINTERS = {
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}


class Recorder:
    """Stands in for a kernel and keeps the last launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: object) -> Recorder:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs


RECORDERS = {
    (module, name): Recorder(getattr(module, name))
    for module, name in (
        (decode, "split_kernel"),
        (decode, "combine_kernel"),
        (extend, "_extend_kernel"),
        (quantize, "_quantize_kernel"),
        (rotate, "_rotate_kernel"),
        (store, "_store_kernel"),
    )
}


def compile_launch(launch: Recorder, capability: int) -> dict[str, int]:
    """As Triton specializes it: multiples of 16 are known as such, 1 and None are constants."""
    names, arguments = launch.kernel.arg_names, launch.arguments
    options = {name: value for name, value in arguments.items() if name in OPTIONS}
    assert set(arguments) - set(options) == set(names)
    constants = {p.name for p in launch.kernel.params if p.is_constexpr}
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value = arguments[name]
        if name in constants or value is None or (type(value) is int and value == 1):
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    if "PDL" in constexprs:
        constexprs["PDL"] = capability >= 90
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}


def record(layout: PageLayout, group: int, softmax: SoftmaxSpec, from_rings: bool) -> dict[str, Recorder]:
    """One decode step's launches, or for quantize one of a prompt."""
    windows = Windows(32, 64, 64)
    state = random_state(layout, windows, num_slots=4, num_pages=4, seed=0, running_energy=not layout.dense)
    batch = random_batch(windows, [223] * 3, [1] * 3, num_slots=4, num_pages=4, seed=0)
    keys, values = random_tokens(layout, batch, seed=0)
    for (module, name), recorder in RECORDERS.items():
        setattr(module, name, recorder)
    query = torch.zeros(3, layout.num_kv_heads * group, layout.head_dim, dtype=layout.dtype)
    decode.decode_attention(query, state, batch, softmax)
    queries = torch.zeros(3, query.shape[1], keys.shape[2], layout.head_dim, dtype=layout.dtype)
    extend.extend_attention(queries, keys, values, state, batch, softmax, read_packed=True)
    store.store_tokens(state, batch, keys, values, None if layout.dense else queries)
    rotate.rotate_values(values)
    boost = LayerBoost("weighted" if from_rings else "dynamic", layout.num_boosted)
    quantize.quantize_pages(state, batch, *((None, None) if from_rings else (keys, values)), boost, None)
    return {name: recorder for (_, name), recorder in RECORDERS.items()}


PLAIN = SoftmaxSpec(0.1)
CASES = {
    "SmolLM2-135M": (PageLayout(3, 64, 2, 2, 8, BF16), 3, PLAIN, True),
    "Llama-3.1-8B": (PageLayout(8, 128, 2, 2, 16, F16), 4, PLAIN, False),
    "16 bits": (PageLayout(8, 128, 16, 16, 0, BF16), 4, PLAIN, False),
    "4 bits, softcap and learned sinks": (
        PageLayout(2, 256, 4, 4, 256, BF16),
        8,
        SoftmaxSpec(0.1, 50.0, torch.zeros(16, dtype=BF16)),
        True,
    ),
}
"""Layout, GQA group size, softmax, whether pages come out of the rings."""


def main(case: str, capability: int) -> None:
    recorded = record(*CASES[case])
    sys.stdout.write(json.dumps({name: compile_launch(launch, capability) for name, launch in recorded.items()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
