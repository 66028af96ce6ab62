"""Initial weights as a function of the seed and each parameter's global name alone: the same in every layout."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_ext.head import log_frequencies

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_WEIGHT = "output_layer.weight"
OUTPUT_BIAS = "output_layer.bias"
_VOCABULARY_PARALLEL = (EMBEDDING, OUTPUT_WEIGHT, OUTPUT_BIAS)


@dataclass(frozen=True, kw_only=True)
class Initialization:
    """What the initial weights depend on.

    Attributes:
        seed: of the weights.
        matrix_std: (global name, whole shape) -> standard deviation of a matrix: a number, or one for each row.
        vocab_size: tokens, without padding; the rows of padding are zero.
        token_counts: the output bias starts at their log frequencies; None starts it at zero.
    """

    seed: int
    matrix_std: Callable[[str, tuple[int, ...]], float | Tensor]
    vocab_size: int
    token_counts: Sequence[int] | None


def global_names(model: Any) -> dict[str, nn.Parameter]:
    """This stage's parameters by the name that they would have in an undivided model.

    Layers are numbered over the whole network, and the last stage's copy of a tied embedding has the embedding's name.
    An nn.ModuleList holds several virtual stages.
    """
    if isinstance(model, nn.ModuleList):
        return {name: parameter for stage in model for name, parameter in global_names(stage).items()}
    prefix = "decoder.layers."
    names = {}
    for name, parameter in model.named_parameters():
        if name.startswith(prefix):
            local, rest = name.removeprefix(prefix).split(".", 1)
            name = f"{prefix}{model.decoder.layers[int(local)].layer_number - 1}.{rest}"
        elif name == OUTPUT_WEIGHT and model.share_embeddings_and_output_weights:
            name = EMBEDDING
        names[name] = parameter
    return names


@torch.no_grad()
def initialize(model: Any, how: Initialization) -> None:
    """Fill every parameter of this stage's GPTModel in place.

    Each whole tensor is drawn in fp32 on the CPU from a generator keyed by (seed, global name), over the true
    vocabulary, and cut for this tensor-parallel rank; so no layout, padding or device changes a weight.
    """
    for name, parameter in global_names(model).items():
        whole = _whole_tensor(name, parameter, whole_shape(name, parameter, how.vocab_size), how)
        parameter.copy_(cut_for_this_rank(whole, parameter))


def whole_shape(
    name: str, parameter: nn.Parameter, vocab_size: int, local_shape: Sequence[int] | None = None
) -> list[int]:
    """Of the undivided tensor with this global name, padding of the vocabulary not counted.

    `local_shape` is this tensor-parallel rank's, for a parameter that has lost it.
    """
    shape = list(local_shape or parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()  # type: ignore[attr-defined]
    return [vocab_size, *shape[1:]] if name in _VOCABULARY_PARALLEL else shape


def _whole_tensor(name: str, parameter: nn.Parameter, shape: list[int], how: Initialization) -> Tensor:
    start = getattr(parameter, "initial_value", None)
    if start is not None:
        return torch.full(shape, start, dtype=torch.float64)
    if name == OUTPUT_BIAS and how.token_counts is not None:
        return log_frequencies(how.token_counts, how.vocab_size)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)  # the gain of a norm
    drawn = torch.empty(shape).normal_(generator=_generator(how.seed, name))
    return drawn * how.matrix_std(name, tuple(shape))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


def cut_for_this_rank(whole: Tensor, parameter: nn.Parameter, local_shape: Sequence[int] | None = None) -> Tensor:
    """This tensor-parallel rank's part of a whole tensor, padded with zeros where the vocabulary is.

    `local_shape` as of :func:`whole_shape`.
    """
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    tp = parallel_state.get_tensor_model_parallel_world_size()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    dimension: int = parameter.partition_dim  # type: ignore[attr-defined]
    stride: int = parameter.partition_stride  # type: ignore[attr-defined]
    padding = (local_shape or parameter.shape)[dimension] * tp - whole.shape[dimension]
    if padding:
        whole = torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])])
    # A gated first projection is two matrices on top of each other, each of them divided: stride 2.
    parts = [block.chunk(tp, dimension)[tp_rank] for block in whole.chunk(stride, dimension)]
    return torch.cat(parts, dimension)
