"""Everything that depends on how DeepSpeed 0.19.8 is built inside: the one place to look at when it changes.

Its internals are read and called where its public interface ends. One thing is replaced, for the time of a step: how
the gradient norm is found (:func:`step_with_norm`).
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
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
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


def global_norm(engine: Any) -> torch.Tensor:
    """Norm of the reduced gradient over all ranks before the clip, as DeepSpeed computes it; collective.

    Returns:
        fp32 scalar on the device; inf where it is not finite, for which DeepSpeed writes -1.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, bf16_optimizer.BF16_Optimizer):
        gradients, _ = optimizer.get_grads_for_norm()
        norm = bf16_optimizer.get_global_norm_of_tensors(
            input_tensors=gradients, mpu=optimizer.mpu, norm_type=optimizer.norm_type
        )
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        norm = combine_grad_norm_groups(optimizer._get_norm_groups())
    else:
        optimizer._wait_for_offload_copies()
        norm = optimizer.scaled_global_norm()
    norm = torch.as_tensor(norm, dtype=torch.float32, device=engine.device).detach()
    return torch.where(norm < 0, torch.inf, norm)


def step_with_norm(engine: Any, norm: torch.Tensor) -> None:
    """DeepSpeed's step with a gradient norm that is known: clip, update, clear the gradients.

    DeepSpeed 0.19.8 computes the norm within its step, where nobody can look at it before the update, and offers no way
    to hand it over. So the one function that it asks is replaced meanwhile. With a ``norm`` on the CPU it also reads
    nothing back from the device.

    Args:
        norm: fp32 scalar, what :func:`global_norm` gave; with inf the gradients are cleared and nothing else happens.
    """
    with _finds_norm(engine.optimizer, norm):
        engine.step()


@contextlib.contextmanager
def _finds_norm(optimizer: Any, norm: torch.Tensor) -> Iterator[None]:
    """Have the optimizer find this norm within."""
    found: Any = norm
    if isinstance(optimizer, bf16_optimizer.BF16_Optimizer):  # asks a function of its module
        owner, name = bf16_optimizer, "get_global_norm_of_tensors"
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        owner, name, found = optimizer, "_get_norm_groups", [norm]
    else:
        owner, name = optimizer, "scaled_global_norm"
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: found)
    try:
        yield
    finally:
        setattr(owner, name, original)


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


def owned_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """View of the owned range of the reduced gradient, after the reduction and before the update; fp32, flat."""
    if _is_divided(parameter):
        owned = owned_range(parameter)
        assert owned is not None
        part: torch.Tensor = parameter._z3_optimizer.get_local_fp32_grad_for_param(parameter)  # type: ignore[attr-defined]
        return part.detach().flatten()[: owned[1] - owned[0]]
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group)  # type: ignore[attr-defined]
    assert isinstance(gradient, torch.Tensor)
    gradient, address = gradient.detach().flatten(), mapping.lp_fragment_address
    return gradient if gradient.numel() == address.numel else gradient.narrow(0, address.start, address.numel)


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
