"""One rank of the parity test: ``OUT_FOLDER CASE...`` with each CASE ``layout`` or ``layout:variant+variant...``.

Trains each for 20 steps and writes what must not depend on the layout, and what must.
"""

import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from megatron.core import parallel_state
from torch._dynamo.utils import counters

import pretrain.passes
from megatron_ext.initialize import global_names
from pretrain import parallel
from pretrain.deepspeed_compat import accumulated_gradient, create_adam_state, owned_fragment, owned_range
from pretrain.engine import Engine
from pretrain.launch import read_launch
from pretrain.monitor.layer_norms import LayerNorms, gradient_norms
from pretrain.schedule import learning_rate
from tests.megatron_ext.small import GPT2
from tests.pretrain import tiny

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "tied": {"model": {"tie_embeddings": True}},
    "pre_norm": {"model": {"residual": {"scheme": "pre_norm"}}},
    "qk_norm": {"model": {"qk_norm": True, "z_loss": 0.01}},
    "gpt2": {"model": {**GPT2, "output_bias": "none"}},
    "recompute": {"model": {"recompute": "full"}},
    "selective": {"model": {"recompute": "selective"}},
    "documents": {"data": {"separate_documents": True}},
    "bf16": {"train": {"precision": "bf16"}},
    **{f"zero{stage}": {"zero": {"stage": stage}} for stage in (0, 2, 3)},
    "compiled": {"train": {"compile": True}},
    "offload": {"zero": {"offload_optimizer": True}},
    "learned": {"model": {"residual": {"scheme": "proj", "radius": "learned"}, "output_bias": "learned"}},
    **{f"micro{size}": {"train": {"micro_batch": size}} for size in (1, 4, 8)},
}
CHANGES_NOTHING = (
    "recompute",
    "compiled",
    "selective",
    "zero0",
    "zero2",
    "zero3",
    "offload",
    "micro1",
    "micro4",
    "micro8",
)
"""Variants whose results are those of a run without them."""


def dropped(function: str, result: Callable[..., Any] = lambda *arguments: None) -> Any:
    return patch.object(pretrain.passes, function, result)


def doubled_tied_gradient() -> Any:
    def reduce(parameter: torch.nn.Parameter, group: dist.ProcessGroup) -> None:
        original(parameter, group)
        if group is parallel_state.get_embedding_group():
            gradient = accumulated_gradient(parameter)
            assert gradient is not None
            gradient.mul_(2)

    original = pretrain.passes._all_reduce_gradient
    return patch.object(pretrain.passes, "_all_reduce_gradient", reduce)


def swapped_micro_batches() -> Any:
    def prepare(engine: Engine, batches: Any) -> Any:
        last = engine.place.pp_rank == parallel_state.get_pipeline_model_parallel_world_size() - 1
        return original(engine, batches[::-1] if last else batches)

    original = Engine._prepare
    return patch.object(Engine, "_prepare", prepare)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "dropped_all_reduce": lambda: dropped("_all_reduce_gradient"),
    "dropped_hook": lambda: dropped("_summed_over_tp", lambda gradient: gradient),
    "dropped_average": lambda: dropped("average_gradients"),
    "doubled_tied_gradient": doubled_tied_gradient,
    "swapped_micro_batches": swapped_micro_batches,
}
"""What must turn the comparison red."""


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    gc.freeze()  # as in a run: DeepSpeed asks for many collections
    parallel.start(read_launch(), tiny.LAYOUTS["one"], seed=0)
    for case in sys.argv[2:]:
        layout, _, variants = case.partition(":")
        names = [name for name in variants.split("+") if name]
        mutations = [MUTATIONS[name]() for name in names if name in MUTATIONS]
        for mutation in mutations:
            mutation.start()
        # A mistake is seen at once.
        result = run(layout, [name for name in names if name not in MUTATIONS], 3 if mutations else 20)
        for mutation in mutations:
            mutation.stop()
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{case}.pt")
    parallel.stop()


def settings(variants: list[str]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for variant in variants:
        for section, values in VARIANTS[variant].items():
            sections[section] = sections.get(section, {}) | values
    return sections


def run(layout: str, variants: list[str], steps: int) -> dict[str, Any]:
    parallel.dissolve()
    counters.clear()
    config = tiny.config(layout, **settings(variants))
    place = parallel.arrange(torch.device("cpu"), config.parallel, config.train.seed)
    documents = config.data.separate_documents
    engine = Engine(config, config.model, tiny.TOKEN_COUNTS, place, tiny.EOD if documents else None)
    batches = functools.partial(
        tiny.micro_batches,
        dp_rank=place.dp_rank,
        dp_size=place.dp_size,
        ends_below=40 if documents else 0,
        micro_batch=config.train.micro_batch,
    )
    result: dict[str, Any] = {"losses": [], "norms": []}
    layer_norms, of_layers = LayerNorms(engine, config.model.num_layers), []
    for step in range(steps):
        share = engine.forward_backward(batches(step))
        measured = engine.measure(share)
        result["norms"].append(measured.grad_norm)
        if step == 0:
            result["gradients"] = full_gradients(engine)
            result["by_layer"] = gradient_norms(engine, config.model.num_layers)
            result["first_weights"] = full_weights(engine)
        with layer_norms.recording():
            engine.step(learning_rate(step, config.train.steps, config.optimizer))
        if step == 0:
            result["second_weights"] = full_weights(engine)
        of_layers.append(layer_norms.reduce())
        result["losses"].append(measured.loss)
    result["graphs"] = counters["stats"].get("unique_graphs", 0), sum(counters["graph_break"].values())
    result["of_layers"] = torch.stack(of_layers)
    # One micro batch at a time: fewer than an interleaved schedule takes.
    result["validation"] = engine.evaluate_unless([[batch] for batch in batches(1000)], lambda: False)
    result["weights"] = full_weights(engine)
    mine = {
        "shapes": {name: tuple(engine.shapes[p]) for name, p in global_names(engine.module).items()},
        "owned": {name: owned_range(p) for name, p in global_names(engine.module).items()},
        "measured": (result["losses"], result["norms"]),
        "place": (place.tp_rank, place.pp_rank, place.dp_rank),
    }
    ranks = from_all(mine)
    assert all(each["measured"] == mine["measured"] for each in ranks), "ranks would not decide alike"
    return result | {"ranks": ranks}


def full_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Every parameter's whole gradient by global name, padding rows cut off; the same on all ranks."""
    return whole({name: safe_get_full_grad(p).float() for name, p in global_names(engine.module).items()}, engine)


def full_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Every parameter's whole fp32 weight by global name, put together from what the ranks own; the same on all."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    create_adam_state(engine.deepspeed)
    found = {}
    for name, parameter in global_names(engine.module).items():
        local = torch.empty(engine.shapes[parameter])
        owned = owned_range(parameter)
        for piece in from_all((owned, owned and owned_fragment(parameter, "fp32").clone()), group):
            if piece[0]:
                local.view(-1)[slice(*piece[0])] = piece[1]
        found[name] = local
    return whole(found, engine)


def whole(mine: dict[str, torch.Tensor], engine: Engine) -> dict[str, torch.Tensor]:
    """Tensors of all ranks by global name, put together over the tensor-parallel ranks."""
    parameters = global_names(engine.module)
    for name, tensor in mine.items():
        parameter = parameters[name]
        if getattr(parameter, "tensor_model_parallel", False):
            tensor = gather(tensor, parameter.partition_dim, parameter.partition_stride)
        if name.startswith(("embedding.word", "output_layer.")):
            assert not tensor[tiny.VOCAB :].any(), f"{name}: the padding is not zero"
            tensor = tensor[: tiny.VOCAB]
        mine[name] = tensor.clone()
    return {name: tensor for stage in from_all(mine) for name, tensor in stage.items()}


def gather(local: torch.Tensor, dimension: int, stride: int) -> torch.Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    blocks = [part.chunk(stride, dimension) for part in parts]
    return torch.cat([torch.cat([b[i] for b in blocks], dimension) for i in range(stride)], dimension)


def from_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


if __name__ == "__main__":
    main()
