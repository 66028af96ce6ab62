"""Everything that depends on how DeepSpeed 0.19.8 is built inside: the one place to look at when it changes.

Nothing of DeepSpeed is replaced here; its internals are read and called where its public interface ends.
"""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

# DeepSpeed picks its accelerator while it is imported; without CUDA it would otherwise guess from installed packages.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

from pretrain.config import OptimizerSettings, ZeroSettings
from pretrain.errors import UserError
from pretrain.zero import GATHERED, REDUCE_BUCKET

try:
    import deepspeed
except ModuleNotFoundError as missing:
    if missing.name != "deepspeed":
        raise
    raise UserError("training needs the package deepspeed, which is not installed; run tools/setup.sh") from None
from deepspeed.utils import logger as deepspeed_logger

deepspeed_logger.setLevel(logging.WARNING)

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")


def _largest_vector(module: torch.nn.Module) -> int:
    """Elements up to which ZeRO-3 keeps a parameter whole.

    Gathering a norm costs more than keeping it, and the residual's numbers are used behind the modules that hold them.
    """
    return max(parameter.numel() for parameter in module.parameters() if parameter.dim() < 2)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what DeepSpeed prints unasked (memory use, compiled extensions); it is shown if something fails."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield
    except BaseException:
        sys.stderr.write(said.getvalue())
        raise


def initialize_communication(backend: str, local_rank: int) -> None:
    """Hand the running process group to DeepSpeed's communication layer."""
    os.environ["LOCAL_RANK"] = str(local_rank)  # asked for by DeepSpeed, whatever the launcher
    with _quiet():
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, dist_init_required=False)


class _SameGroups(torch.nn.Module):
    """A pipeline stage plus one idle element, which joins the parameters that are not decayed.

    DeepSpeed drops a parameter group that is empty and reduces the gradient norm group by group over all stages. A
    stage of sphere layers has no norm and no bias, so without the idle element its ranks would wait for ever.
    """

    def __init__(self, stage: torch.nn.Module) -> None:
        super().__init__()
        self.stage = stage
        device = next(stage.parameters()).device
        self.idle = torch.nn.Parameter(torch.zeros(1, dtype=next(stage.parameters()).dtype, device=device))

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The stage's; ZeRO-3 gathers weights where this module is called, not where the stage is."""
        return self.stage(*arguments, **named)


def initialize_zero(
    stage: torch.nn.Module, settings: OptimizerSettings, zero: ZeroSettings, mpu: Any, batch: int, bf16: bool
) -> Any:
    """A DeepSpeed engine that owns gradient reduction, the clip and the AdamW step of a pipeline stage.

    DeepSpeed sees one accumulation step, whoever accumulates the micro batches. In bf16 the gradients accumulate in
    fp32 as soon as each micro batch produced them (``immediate_grad_update``): without it they would add up in bf16
    first. They are reduced in fp32 too: by default DeepSpeed rounds the sums to bf16 for that.

    DeepSpeed's own stage 0 has no bf16 with fp32 accumulation and, in fp32, leaves later pipeline stages out of the
    gradient norm. So stage 0 is its stage 1 here, with an ``mpu`` that shows each rank alone.

    Args:
        batch: samples per data-parallel rank and step; DeepSpeed only checks that the numbers agree.
    """
    module = _SameGroups(stage)
    held = sum(parameter.numel() for parameter in module.parameters())
    description: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "train_batch_size": batch * mpu.get_data_parallel_world_size(),
        "gradient_clipping": settings.clip,
        "zero_optimization": {
            "stage": max(1, zero.stage),
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": min(held, REDUCE_BUCKET),
            "stage3_max_live_parameters": GATHERED,
            "stage3_max_reuse_distance": GATHERED,
            "stage3_param_persistence_threshold": _largest_vector(module),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if zero.offload_optimizer:
        offload = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        description["zero_optimization"]["offload_optimizer"] = offload
    if bf16:
        description["bf16"] = {"enabled": True, "immediate_grad_update": True}
        description["data_types"] = {"grad_accum_dtype": "fp32"}
        description["communication_data_type"] = "fp32"
    with _quiet():
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=_adamw(module, settings), mpu=mpu, config=description, dist_init_required=False
        )
    return engine


def _adamw(module: torch.nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW that decays matrices and nothing else: no norm, bias or step size."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )


def forget_skipped_step(engine: Any) -> None:
    """Before the passes of a step: drop the gradients of one that was not applied.

    With the optimizer offloaded and bf16, DeepSpeed keeps them and would add the next ones to what was not finite.
    """
    kept = getattr(engine.optimizer, "averaged_gradients", {})
    for group in kept:
        kept[group] = None


def finish_backward(engine: Any) -> None:
    """Bring the gradients that the schedule left on the parameters to where DeepSpeed accumulates them."""
    engine.optimizer.backward_epilogue()


def accumulated_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The gradient summed over a step's micro batches on this rank: fp32, flat in bf16 runs; None if there is none."""
    for attribute in ("_hp_grad", "grad_accum", "grad"):
        gradient = getattr(parameter, attribute, None)
        if gradient is not None:
            assert isinstance(gradient, torch.Tensor)
            return gradient
    return None


def _is_divided(parameter: torch.nn.Parameter) -> bool:
    """Whether ZeRO-3 holds the parameter: then its own data are a part of it, or nothing."""
    return hasattr(parameter, "ds_id")


def owned_range(parameter: torch.nn.Parameter) -> tuple[int, int] | None:
    """Flat range [start, end) of ``parameter`` whose optimizer state this data-parallel rank owns, or None."""
    if _is_divided(parameter):
        zero: Any = parameter._z3_optimizer  # type: ignore[attr-defined]
        part = parameter.partition_numel()  # type: ignore[attr-defined]
        start = part * zero._get_param_partition_rank(parameter)
        end = min(start + part, parameter.ds_numel)  # type: ignore[attr-defined]
        return (start, end) if start < end else None
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    address = mapping.lp_fragment_address
    return address.start, address.start + address.numel


def owned_fragment(parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
    """View of the owned range: ``fp32`` is the master weight, else a name of :data:`ADAM_MOMENTS`. fp32, flat."""
    if _is_divided(parameter):
        zero: Any = parameter._z3_optimizer  # type: ignore[attr-defined]
        group, start, _ = zero.grad_position[zero.get_param_id(parameter)]
        flat = zero.fp32_partitioned_groups_flat[group]
        owned = owned_range(parameter)
        assert owned is not None
        whole: torch.Tensor = (flat if name == "fp32" else zero.optimizer.state[flat][name]).detach()
        return whole[start : start + owned[1] - owned[0]]
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    fragment = mapping.get_hp_fragment(None if name == "fp32" else name)
    assert isinstance(fragment, torch.Tensor)
    return fragment.detach()


def create_adam_state(engine: Any) -> None:
    """Make Adam's state exist and be linked to the parameters, as after a first step.

    A fresh engine has no state, and DeepSpeed links states after its first parameter group only, so later groups
    would stay without.
    """
    adam = engine.optimizer.optimizer
    # ZeRO-3 shows them to Adam within a step only.
    divided = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)
    for flat in divided or [flat for group in adam.param_groups for flat in group["params"]]:
        if not adam.state.get(flat):
            adam.state[flat] = {"step": torch.zeros((), dtype=torch.float32, device=flat.device)} | {
                name: torch.zeros_like(flat.data) for name in ADAM_MOMENTS
            }
    if divided:
        return
    engine.optimizer._hp_optimizer_states_linked = False
    engine.optimizer._lazy_init_hp_params_optimizer_state()


def adam_step(engine: Any) -> int:
    """Number of updates that were applied; a step with a non-finite gradient is skipped and not counted."""
    steps = {int(state["step"]) for state in engine.optimizer.optimizer.state.values() if "step" in state}
    return max(steps, default=0)


def finish_load(engine: Any, step: int) -> None:
    """After the fp32 masters and moments were filled: set Adam's step and refresh the working weights on all ranks."""
    for state in engine.optimizer.optimizer.state.values():
        state["step"].fill_(step)
    zero = engine.optimizer
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        zero.update_lp_params()
        return
    with torch.no_grad():
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
