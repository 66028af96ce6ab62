"""One rank of the parity test: ``OUT_FOLDER CASE`` with CASE ``layout`` or ``layout:variant``.

Trains for 20 steps and writes what must not depend on the layout, and what must.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from megatron.core import parallel_state

import pretrain.engine
from megatron_ext.initialize import global_names
from pretrain import parallel
from pretrain.deepspeed_compat import owned_range
from pretrain.engine import Engine
from pretrain.launch import read_launch
from pretrain.recovery.layers import gradient_norms
from pretrain.schedule import learning_rate
from tests.megatron_ext.small import GPT2
from tests.pretrain import tiny

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "": {},
    "tied": {"model": {"tie_embeddings": True}},
    "pre_norm": {"model": {"residual": {"scheme": "pre_norm"}}},
    "qk_norm": {"model": {"qk_norm": True, "z_loss": 0.01}},
    "gpt2": {"model": {**GPT2, "output_bias": "none"}},
    "recompute": {"model": {"recompute": "full"}},
    "documents": {"data": {"separate_documents": True}, "model": {"qk_norm": True, "recompute": "full"}},
    "documents_gpt2": {"data": {"separate_documents": True}, "model": {**GPT2, "output_bias": "none"}},
    "bf16": {"train": {"precision": "bf16"}},
    "dropped_all_reduce": {},
}


def main() -> None:
    folder, case = Path(sys.argv[1]), sys.argv[2]
    layout, _, variant = case.partition(":")
    if variant == "dropped_all_reduce":
        pretrain.engine._all_reduce_gradient = lambda parameter, group: None
    result = run(layout, variant)
    if dist.get_rank() == 0:
        torch.save(result, folder / f"{case}.pt")
    parallel.stop()


def run(layout: str, variant: str) -> dict[str, Any]:
    config = tiny.config(layout, **VARIANTS[variant])
    place = parallel.start(read_launch(), config.parallel, config.train.seed)
    documents = config.data.separate_documents
    engine = Engine(config, config.model, tiny.TOKEN_COUNTS, place, tiny.EOD if documents else None)
    ends_below = 40 if documents else 0
    losses, norms, by_layer, gradients = list[float](), list[float](), list[float](), {}
    for step in range(config.train.steps):
        share = engine.forward_backward(tiny.micro_batches(step, place.dp_rank, place.dp_size, ends_below))
        if step == 0:
            gradients = full_gradients(engine)
            by_layer = gradient_norms(engine, config.model.num_layers)
        measured = engine.measure(share)
        engine.step(learning_rate(step, config.train.steps, config.optimizer))
        losses.append(measured.loss)
        norms.append(measured.grad_norm)
    held_out = engine.evaluate(tiny.micro_batches(1000, place.dp_rank, place.dp_size, ends_below))
    mine = {
        "shapes": {name: tuple(p.shape) for name, p in global_names(engine.module).items()},
        "owned": {name: owned_range(p) for name, p in global_names(engine.module).items()},
        "measured": (losses, norms),
        "place": (place.tp_rank, place.pp_rank, place.dp_rank),
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    assert all(rank["measured"] == (losses, norms) for rank in ranks), "ranks would not decide alike"
    return {
        "losses": losses,
        "norms": norms,
        "by_layer": by_layer,
        "gradients": gradients,
        "validation": held_out,
        "ranks": ranks,
    }


def full_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Every parameter's whole gradient by global name, padding rows cut off; the same on all ranks."""
    mine = {}
    for name, parameter in global_names(engine.module).items():
        gradient = safe_get_full_grad(parameter)
        assert gradient is not None, name
        gradient = gradient.float()
        if getattr(parameter, "tensor_model_parallel", False):
            gradient = gather(gradient, parameter.partition_dim, parameter.partition_stride)
        if name.startswith(("embedding.", "output_layer.")):
            assert not gradient[tiny.VOCAB :].any(), f"{name}: the padding has a gradient"
            gradient = gradient[: tiny.VOCAB]
        mine[name] = gradient.clone()
    stages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stages, mine)
    return {name: gradient for stage in stages for name, gradient in stage.items()}


def gather(local: torch.Tensor, dimension: int, stride: int) -> torch.Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    blocks = [part.chunk(stride, dimension) for part in parts]
    return torch.cat([torch.cat([b[i] for b in blocks], dimension) for i in range(stride)], dimension)


if __name__ == "__main__":
    main()
