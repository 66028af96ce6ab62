"""What a model takes on one rank: parameters, what a micro batch keeps for its backward pass, what works besides.

Nothing here is a formula for a scheme: one and two layers of the real model run on the meta device, forward and
backward, and what stays alive is counted (:mod:`megatron_ext.pretended`). All layers but the first keep the same, so
the difference is one layer's.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.model import build_model
from megatron_ext.pretended import OnMeta, Target, pretended_rank
from megatron_ext.settings import ModelSettings, ParallelSettings


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters on one tensor-parallel rank.

    Attributes:
        divided: of tensors that are cut over the tensor-parallel ranks.
        repeated: of tensors that every one of them holds whole.
    """

    divided: int = 0
    repeated: int = 0

    @property
    def held(self) -> int:
        """On this rank."""
        return self.divided + self.repeated

    def whole(self, tp: int) -> int:
        """In the model: each parameter once."""
        return self.divided * tp + self.repeated

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.divided + other.divided, self.repeated + other.repeated)

    def __mul__(self, times: int) -> "Parameters":
        return Parameters(self.divided * times, self.repeated * times)


@dataclass(frozen=True)
class StageParts:
    """What the parts of a model take on one tensor-parallel rank; bytes are those of one micro batch.

    Attributes:
        embedding: parameters in front of the layers, the stream's entry included.
        layer: parameters of one layer.
        head: parameters behind the layers; with a tied embedding not its matrix.
        tied: parameters of the matrix that a last stage holds a second time.
        layer_saved: bytes that a layer keeps for the backward pass.
        embedding_saved: bytes that the embedding, the stream's entry and the rotary angles keep.
        head_saved: bytes that the final norm's output, the logits and the loss keep.
        layer_work: bytes at the most beyond the kept ones while a layer runs forward or backward; with recomputation
            the layer's own.
        head_work: bytes at the most beyond the layers' while final norm, output layer and loss run forward and
            backward, what they keep included.
    """

    embedding: Parameters
    layer: Parameters
    head: Parameters
    tied: Parameters
    layer_saved: int
    embedding_saved: int
    head_saved: int
    layer_work: int
    head_work: int

    def scaled(self, micro_batch: int) -> "StageParts":
        """For a larger micro batch, taking all bytes as proportional; parts that are not make this an upper bound."""
        names = ("layer_saved", "embedding_saved", "head_saved", "layer_work", "head_work")
        return dataclasses.replace(self, **{name: micro_batch * getattr(self, name) for name in names})


@dataclass(frozen=True)
class Measured:
    """One model on the meta device, see :class:`StageParts`."""

    parameters: Sequence[tuple[str, int, bool]]
    layers_saved: int
    head_saved: int
    layer_work: int
    head_work: int


@lru_cache(maxsize=256)
def stage_parts(
    model: ModelSettings, parallel: ParallelSettings, micro_batch: int, dtype: torch.dtype, target: Target
) -> StageParts:
    """Measure the parts of a model under `parallel`'s tp, sp and cp, whatever its number of layers.

    Args:
        model: `vocab_size` must be set.
        micro_batch: samples.
        dtype: of parameters and stream.
        target: whose kernels would run.

    Raises:
        ValueError: as :func:`megatron_ext.build_model`.
        RuntimeError: process groups run already.
    """
    layout = ParallelSettings(tp=parallel.tp, sp=parallel.sp, cp=parallel.cp)
    with pretended_rank(layout), OnMeta(target):
        one, two = (
            measure(dataclasses.replace(model, num_layers=layers), layout, micro_batch, dtype) for layers in (1, 2)
        )
    layer_saved = two.layers_saved - one.layers_saved
    return StageParts(
        embedding=_count(one, "embedding.", "decoder.layers.0.entry."),
        layer=_count(two, "decoder.layers.1."),
        head=_count(one, "decoder.final_layernorm.", "output_layer."),
        tied=_count(one, "embedding.word_embeddings.") if model.tie_embeddings else Parameters(),
        layer_saved=layer_saved,
        embedding_saved=one.layers_saved - layer_saved,
        head_saved=one.head_saved,
        layer_work=two.layer_work,
        head_work=one.head_work,
    )


def _count(measured: Measured, *prefixes: str) -> Parameters:
    chosen = [(numel, divided) for name, numel, divided in measured.parameters if name.startswith(prefixes)]
    return Parameters(
        divided=sum(numel for numel, divided in chosen if divided),
        repeated=sum(numel for numel, divided in chosen if not divided),
    )


def measure(model: ModelSettings, parallel: ParallelSettings, micro_batch: int, dtype: torch.dtype) -> Measured:
    """One undivided pipeline on the meta device, within :func:`pretended_rank` and :class:`OnMeta`."""
    stage: Any = build_model(model, parallel, dtype=dtype, device="meta", seed=0, token_counts=None)
    for parameter in stage.parameters():
        # As the engine does: a gradient is added to where gradients accumulate, and gone.
        parameter.register_post_accumulate_grad_hook(_forget_gradient)
    kept, alive = SavedTensors(stage), LiveBytes()
    marks = _mark_the_head(stage, kept, alive)
    sequence = model.sequence_length // parallel.cp
    tokens = torch.zeros(micro_batch, sequence, dtype=torch.int64, device="meta")
    positions = torch.arange(sequence, device="meta").expand(micro_batch, -1)
    with alive:
        with kept.recording():
            loss = stage(tokens, positions, None, labels=tokens).float().sum()
        head_saved = kept.bytes - marks["saved"]
        kept.forget()
        torch.autograd.backward(loss)
    return Measured(
        parameters=[
            (name, parameter.numel(), bool(getattr(parameter, "tensor_model_parallel", False)))
            for name, parameter in stage.named_parameters()
        ],
        layers_saved=marks["saved"],
        head_saved=head_saved,
        layer_work=max(marks["forward"], alive.peak) - marks["saved"],
        head_work=marks["head"] - marks["saved"],
    )


def _mark_the_head(stage: Any, kept: "SavedTensors", alive: "LiveBytes") -> dict[str, int]:
    """Note what is kept when the head begins, and the peaks until there, and until the backward pass is back."""
    marks: dict[str, int] = {}

    def back(gradient: Tensor) -> None:
        marks["head"] = alive.restart()

    def head_begins(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        marks["saved"], marks["forward"] = kept.bytes, alive.restart()
        inputs[0].register_hook(back)  # type: ignore[no-untyped-call]

    (stage.decoder.final_layernorm or stage.output_layer).register_forward_pre_hook(head_begins)
    return marks


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class SavedTensors:
    """Bytes of the storages that autograd keeps, each once, without the parameters'."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        self._storages: dict[int, Any] = {}

    @property
    def bytes(self) -> int:
        """Kept so far."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def recording(self) -> Any:
        """A context whose forward passes are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def forget(self) -> None:
        """Let go of the storages, which are held so that none is counted twice."""
        self._storages.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._parameters:
            self._storages.setdefault(storage._cdata, storage)
        return tensor


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all tensors that were made within this mode and are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def restart(self) -> int:
        """The peak so far; from now on it is that of what follows."""
        peak, self.peak = self.peak, self.live
        return peak

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, size: int) -> None:
        self.live -= size
