"""One rank of the layout tests: run every case in every layout given, one after another, and save what came out.

Usage: python -m tests.megatron_ext.layouts_worker FOLDER LAYOUT...  (a layout is a name of LAYOUTS)
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_ext import SCHEMES, GeometryProbe, ModelSettings, ParallelSettings, install_cpu_support
from megatron_ext.initialize import global_names
from tests.megatron_ext import small

LAYOUTS = {
    "dp": ParallelSettings(),
    "tp2": ParallelSettings(tp=2),
    "tp2 sp": ParallelSettings(tp=2, sp=True),
    "pp2": ParallelSettings(pp=2),
    "tp2 pp2": ParallelSettings(tp=2, pp=2),
    "tp2 sp pp2": ParallelSettings(tp=2, sp=True, pp=2),
    "pp4": ParallelSettings(pp=4),
}
CASES = {
    "geonorm": small.settings(),
    "geonorm, recomputed": small.settings(recompute="full"),
    "geonorm, a whole tensor-parallel rank of padding": small.settings(vocab_size=100),
    "gpt2": small.settings("pre_norm", **small.GPT2),
    "biases on a gated MLP": small.settings(linear_bias=True),
    "qk_norm, z_loss": small.settings(qk_norm=True, z_loss=0.01),
}

EVERY_SCHEME = {
    **{f"{scheme}, alone": small.settings(scheme) for scheme in SCHEMES},
    **{
        f"{scheme}, all learned": small.settings(
            scheme, {"learn_alpha": True, "learn_angle_scale": True, "radius": "learned"}
        )
        for scheme in ("geonorm", "proj")
    },
    "ngpt_lerp, learned radius": small.settings("ngpt_lerp", {"radius": "learned", "final_norm": "layernorm"}),
    **{
        f"{scheme}, layernorm, biases": small.settings(scheme, normalization="layernorm", linear_bias=True)
        for scheme in ("post_norm", "peri_ln", "pre_dyt")
    },
}
"""Where all parameters outside the sublayers are replicated: with and without sequence parallelism, and on stages."""
LAYOUTS_OF_EVERY_SCHEME = ("dp", "tp2", "tp2 sp pp2")


def cases_of(layout: str) -> dict[str, ModelSettings]:
    return CASES | EVERY_SCHEME if layout in LAYOUTS_OF_EVERY_SCHEME else CASES


def main(folder: Path, layouts: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    install_cpu_support()
    for layout in layouts:
        parallel = LAYOUTS[layout]
        parallel_state.initialize_model_parallel(parallel.tp, parallel.pp)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        results = {case: run(model, parallel) for case, model in cases_of(layout).items()}
        if dist.get_rank() == 0:
            torch.save(results, folder / f"{layout}.pt")
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def run(model: ModelSettings, parallel: ParallelSettings) -> dict[str, Any]:
    """The whole initial weights and gradients by global name, the losses of the tokens, and the geometry."""
    stage = small.build(model, parallel)
    weights = whole({name: parameter.detach() for name, parameter in global_names(stage).items()}, stage)
    probe = GeometryProbe(stage)
    with probe.recording():
        losses = train(stage, model)
    geometry = probe.reduce(None)
    synchronise(stage)
    gradients = whole({name: parameter.grad for name, parameter in global_names(stage).items()}, stage)
    return {
        "weights": weights,
        "gradients": gradients,
        "losses": losses,
        "angle": geometry.mean_angle,
        "length": geometry.resultant_length,
        "geometry on all ranks": gathered((geometry.mean_angle, geometry.resultant_length)),
        "meta": {name: tuple(p.shape) for name, p in small.build(model, parallel, device="meta").named_parameters()}
        == {name: tuple(p.shape) for name, p in stage.named_parameters()},
    }


def train(stage: Any, model: ModelSettings) -> Tensor:
    """Forward and backward of one micro batch by Megatron-core's schedule; the last stage's losses, on every rank."""
    tokens, labels, positions, loss_weights = small.batch(model.vocab_size or 0)

    def forward_step(data: Any, chunk: Any) -> tuple[Tensor, Any]:
        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            count = torch.tensor(output.numel(), dtype=torch.int)
            return (output * loss_weights).sum(), count, {"losses": output.detach().clone()}

        return chunk(tokens, positions, None, labels=labels), loss

    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=None,
        model=stage,
        num_microbatches=1,
        seq_length=small.SEQUENCE,
        micro_batch_size=small.BATCH,
        forward_only=False,
    )
    from_all: list[Any] = gathered([report["losses"] for report in reports])
    return next(losses[0] for losses in from_all if losses)


def synchronise(stage: Any) -> None:
    """What the training engine does: sums of partial gradients over the tensor-parallel and the embedding group."""
    for parameter in stage.parameters():
        if parameter.partial_over_tp:
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
    tied_over_stages = stage.share_embeddings_and_output_weights and stage.config.pipeline_model_parallel_size > 1
    # Not is_rank_in_embedding_group: destroy_model_parallel leaves its answer from the layout before.
    if tied_over_stages and (stage.pre_process or stage.post_process):
        weight = stage.shared_embedding_or_output_weight()
        dist.all_reduce(weight.grad, group=parallel_state.get_embedding_group())


def whole(parts: dict[str, Tensor], stage: Any) -> dict[str, list[Tensor]]:
    """Every tensor put together over the tensor-parallel group; one entry for each copy that some rank holds."""
    attributes = {
        name: (parameter.partition_dim, parameter.partition_stride)
        for name, parameter in global_names(stage).items()
        if getattr(parameter, "tensor_model_parallel", False)
    }
    places = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank())
    from_all = gathered((places, {name: part.clone() for name, part in parts.items()}, attributes))
    copies: dict[str, list[Tensor]] = {}
    for pp_rank in sorted({place[1] for place, _, _ in from_all}):
        stage_parts = {place[0]: (tensors, marks) for place, tensors, marks in from_all if place[1] == pp_rank}
        for name in stage_parts[0][0]:
            pieces = [stage_parts[tp_rank][0][name] for tp_rank in sorted(stage_parts)]
            marks = stage_parts[0][1].get(name)
            # A replicated tensor counts as one copy on each tensor-parallel rank.
            copies.setdefault(name, []).extend(pieces if marks is None else [joined(pieces, *marks)])
    return copies


def joined(pieces: list[Tensor], dimension: int, stride: int) -> Tensor:
    blocks = [piece.chunk(stride, dimension) for piece in pieces]
    return torch.cat([block[i] for i in range(stride) for block in blocks], dimension)


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
