"""Train a small Qwen3 model, for figures on a second architecture with trained weights: head_dim 128, normalized keys.

    python benchmarks/train_qwen3.py FOLDER     # on a GPU, about 8 minutes
    kitty profile FOLDER -o FOLDER.safetensors
    python benchmarks/tuned.py --text manual --model FOLDER --profile FOLDER.safetensors

The text is Python source of the packages that are installed, with the tokenizer of the demo model. The modules that
`kitty_runtime.texts.source_text` reads are left out, and so are the manual's pages. The seed is fixed, the text is what
the machine has: two machines train two models. Prints the loss, and last one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from kitty_runtime.models.loading import load_tokenizer, resolve_model
from kitty_runtime.texts import SOURCE_MODULES

CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
HELD_OUT = {f"{name}.py" for name in SOURCE_MODULES}
SEQ_LEN, LEARNING_RATE, WARM_UP = 4096, 1e-3, 200


def corpus(tokenizer: PreTrainedTokenizerBase, num_bytes: int) -> Tensor:
    """Token ids of installed source files, in an order that the seed decides."""
    paths = sysconfig.get_paths()
    files = sorted({p for key in ("stdlib", "purelib") for p in Path(paths[key]).rglob("*.py")})
    files = [p for p in files if p.name not in HELD_OUT and "pydoc_data" not in p.parts]
    random.Random(0).shuffle(files)
    ids, taken, batch = [], 0, []
    for path in files:
        batch.append(path.read_text(errors="ignore"))
        taken += len(batch[-1])
        if len(batch) == 256 or taken > num_bytes:
            rows = tokenizer(batch).input_ids
            ids += [torch.tensor([tokenizer.eos_token_id, *row], dtype=torch.int32) for row in rows]
            batch = []
        if taken > num_bytes:
            break
    return torch.cat(ids)


def batches(ids: Tensor, size: int, device: torch.device) -> Iterator[Tensor]:
    """Random windows of the text, int64 ``[size, SEQ_LEN]``."""
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(ids) - SEQ_LEN, (size,), generator=generator).tolist()
        yield torch.stack([ids[s : s + SEQ_LEN] for s in starts]).to(device, torch.int64)


def learning_rate(done: float, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth; `done` is the share of the time that has gone."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * min(done, 1.0)))


def train(model: Qwen3ForCausalLM, ids: Tensor, batch_size: int, seconds: float) -> tuple[int, float]:
    """Steps that were made and the mean loss of the last hundred."""
    device = model.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses: list[float] = []
    start = time.monotonic()
    for step, tokens in enumerate(batches(ids, batch_size, device)):
        done = (time.monotonic() - start) / seconds
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, step)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"step {step}, {100 * done:.0f} % of the time, loss {losses[-1]:.3f}", flush=True)
    return len(losses), sum(losses[-100:]) / len(losses[-100:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=6.0, help="of training, the text's tokens are made before")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=120.0, help="of text")
    asked = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(resolve_model("demo"))
    ids = corpus(tokenizer, int(asked.megabytes * 1e6))
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **CONFIG)).to(device)
    steps, loss = train(model, ids, asked.batch_size, 60 * asked.minutes)
    model.to(torch.float16).save_pretrained(asked.folder)
    tokenizer.save_pretrained(asked.folder)
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"parameters": parameters, "text_tokens": len(ids), "steps": steps, "batch_size": asked.batch_size,
                      "seq_len": SEQ_LEN, "loss": loss, "config": CONFIG, "device": str(device)}))  # fmt: skip


if __name__ == "__main__":
    main()
