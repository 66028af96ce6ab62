"""Small models of ours, written for transformers and loaded from there."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext import ModelSettings
from megatron_ext.initialize import EMBEDDING, OUTPUT_BIAS, OUTPUT_WEIGHT, global_names
from pretrain.export.hf import model_class, write_model
from pretrain.export.names import heads_of
from pretrain.export.targets import target_of
from tests.megatron_ext import small


class ModuleWeights:
    """The weights of a module, as a checkpoint would give them."""

    def __init__(self, module: Any, vocab_size: int = small.VOCAB_SIZE) -> None:
        self.tensors = {
            name: parameter.detach()[:vocab_size]
            if name in (EMBEDDING, OUTPUT_BIAS, OUTPUT_WEIGHT)
            else parameter.detach()
            for name, parameter in global_names(module).items()
        }
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def write(model: ModelSettings, module: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Write a model; returns its target."""
    target = target_of(model, small.VOCAB_SIZE)
    write_model(ModuleWeights(module), target, heads_of(model), dtype, small.EOD, folder)
    return target


def loaded(target: Any, folder: Path) -> Any:
    """The model of a folder, in fp32, by its class."""
    return model_class(target).from_pretrained(folder, dtype=torch.float32).eval()
