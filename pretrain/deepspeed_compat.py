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

import deepspeed
from deepspeed.runtime import bf16_optimizer
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
    else:
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
    bf16 = isinstance(optimizer, bf16_optimizer.BF16_Optimizer)
    # BF16_Optimizer asks a function of its module, the others a method of their own.
    owner, name = (bf16_optimizer, "get_global_norm_of_tensors") if bf16 else (optimizer, "scaled_global_norm")
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: norm)
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
