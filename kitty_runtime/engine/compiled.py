"""torch.compile of the decoder layers while a decode step is captured: norms, rotary embedding and activations fuse.

The captured graph keeps the fused kernels, so that the layers are compiled during a capture alone and the model stays
as it was for prompts and for other users. The cache and its attention stay outside: to the compiler they are calls that
it does not look into.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AttentionInterface

from kitty_runtime.engine.cache import ENGINE_ATTENTION, EngineCache
from kitty_runtime.models.attention import kitty_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def compiled_layers(model: PreTrainedModel, cache: EngineCache, backend: str = "inductor") -> Iterator[None]:
    """Inside the block the model's decoder layers are compiled, once for a batch of one and once for all others.

    Raises:
        torch._dynamo.exc.TorchDynamoException: in the block, when a layer cannot be compiled.
    """
    layers = decoder_layers(model)
    AttentionInterface.register(ENGINE_ATTENTION, torch.compiler.disable(kitty_attention))
    cache.update = torch.compiler.disable(cache.update)
    # Layers differ in a number that only the cache reads: one compilation serves all.
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        for layer in layers:
            layer.compile(dynamic=True, backend=backend)
        try:
            yield
        finally:
            for layer in layers:
                layer._compiled_call_impl = None
            del cache.update
            AttentionInterface.register(ENGINE_ATTENTION, kitty_attention)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's layers in order; none if they are not in one list, as transformers has them."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return []
