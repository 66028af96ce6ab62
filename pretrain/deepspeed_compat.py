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

import deepspeed
from deepspeed.utils import logger as deepspeed_logger

from pretrain.config import OptimizerSettings

deepspeed_logger.setLevel(logging.WARNING)

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")


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


def initialize_zero(stage: torch.nn.Module, settings: OptimizerSettings, mpu: Any, batch: int, bf16: bool) -> Any:
    """A DeepSpeed engine that owns gradient reduction, the clip and the ZeRO-1 AdamW step of a pipeline stage.

    Megatron's schedule accumulates the micro batches, so DeepSpeed sees one accumulation step. In bf16 the gradients
    accumulate in fp32 as soon as each micro batch produced them (``immediate_grad_update``): without it they would
    add up in bf16 first. They are reduced in fp32 too: by default DeepSpeed rounds the sums to bf16 for that.

    Args:
        batch: samples per data-parallel rank and step; DeepSpeed only checks that the numbers agree.
    """
    module = _SameGroups(stage)
    description: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "train_batch_size": batch * mpu.get_data_parallel_world_size(),
        "gradient_clipping": settings.clip,
        "zero_optimization": {"stage": 1, "overlap_comm": False, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
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


def owned_range(parameter: torch.nn.Parameter) -> tuple[int, int] | None:
    """Flat range [start, end) of ``parameter`` whose optimizer state this data-parallel rank owns, or None."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    address = mapping.lp_fragment_address
    return address.start, address.start + address.numel


def owned_fragment(parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
    """View of the owned range: ``fp32`` is the master weight, else a name of :data:`ADAM_MOMENTS`. fp32, flat."""
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    fragment = mapping.get_hp_fragment(None if name == "fp32" else name)
    assert isinstance(fragment, torch.Tensor)
    return fragment.detach()


def owned_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """View of the owned range of the reduced gradient, after the reduction and before the update; fp32, flat."""
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
    for group in adam.param_groups:
        for flat in group["params"]:
            if not adam.state.get(flat):
                adam.state[flat] = {"step": torch.zeros((), dtype=torch.float32, device=flat.device)} | {
                    name: torch.zeros_like(flat.data) for name in ADAM_MOMENTS
                }
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
    engine.optimizer.update_lp_params()
