"""What a real model of the tests keeps for its backward pass on the CPU."""

from typing import Any

import torch
from torch import Tensor

from megatron_ext import ModelSettings, ParallelSettings, build_model


def saved_bytes(model: ModelSettings, parallel: ParallelSettings, micro_batch: int, dtype: torch.dtype) -> int:
    """Bytes of the distinct storages that one forward pass saves, on this rank; parameters not counted."""
    assert model.vocab_size is not None
    counts = [1] * model.vocab_size
    stage: Any = build_model(model, parallel, dtype=dtype, device="cpu", seed=0, token_counts=counts)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    sequence = model.sequence_length // parallel.cp
    tokens = torch.arange(micro_batch * sequence).view(micro_batch, -1) % model.vocab_size
    positions = torch.arange(sequence).expand(micro_batch, -1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = stage(tokens, positions, None, labels=tokens.roll(-1, dims=1)).sum()
    loss.backward()
    return sum(kept[pointer].untyped_storage().nbytes() for pointer in set(kept) - parameters)
