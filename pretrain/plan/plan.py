"""What a plan holds."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_ext.flops import CONVENTION
from pretrain.config import Config
from pretrain.plan.disk import Disk
from pretrain.plan.layouts import Layout, Machines, changes
from pretrain.rampup import samples_of


@dataclass(frozen=True)
class Plan:
    """A run before it starts.

    Attributes:
        dp: data-parallel ranks.
        parameters: of the whole model, vocabulary padding included.
        parameters_of_ranks: held by one rank of each pipeline stage.
        layout: of the configuration.
        seconds: of the run, without validation and checkpoints.
        flops: model FLOPs of a step.
        bubble: share of a step that pipeline stages wait.
        disk: for checkpoints.
        epoch_tokens: of the data sets, None where they are not at hand.
        warnings: one line each.
        better: a layout worth changing to, if there is one.
    """

    config: Config
    vocab_size: int
    machines: Machines
    dp: int
    parameters: int
    parameters_of_ranks: list[int]
    layout: Layout
    seconds: float
    flops: int
    bubble: float
    disk: Disk
    epoch_tokens: int | None
    warnings: list[str]
    better: Layout | None

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, the largest where the batch ramps up."""
        return self.config.train.global_batch * self.config.model.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return samples_of(self.config.train.steps, self.config.train) * self.config.model.sequence_length

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits its GPU."""
        return self.layout.memory.total <= self.machines.usable_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the names say the units."""
        return {
            "gpu": self.machines.gpu.name,
            "gpus": self.machines.gpus,
            "tp": self.config.parallel.tp,
            "sp": self.config.parallel.sp,
            "pp": self.config.parallel.pp,
            "vpp": self.config.parallel.vpp,
            "cp": self.config.parallel.cp,
            "dp": self.dp,
            "vocab_size": self.vocab_size,
            "parameters": self.parameters,
            "parameters_of_ranks": self.parameters_of_ranks,
            "memory_bytes": _memory(self.layout),
            "usable_bytes": int(self.machines.usable_bytes),
            "fits": self.fits,
            "step_tokens": self.step_tokens,
            "step_flops": self.flops,
            "flops_convention": " ".join(CONVENTION),
            "step_seconds": dataclasses.asdict(self.layout.time) | {"total": self.layout.time.total},
            "bubble_share": self.bubble,
            "run_tokens": self.tokens,
            "run_seconds": self.seconds,
            "epoch_tokens": self.epoch_tokens,
            "checkpoints": dataclasses.asdict(self.disk) | {"total_bytes": self.disk.total},
            "warnings": self.warnings,
            "better": None
            if self.better is None
            else {
                "settings": changes(self.config, self.better.config),
                "memory_bytes": _memory(self.better),
                "step_seconds": self.better.time.total,
            },
        }


def _memory(layout: Layout) -> dict[str, int]:
    return dataclasses.asdict(layout.memory) | {"total": layout.memory.total}
