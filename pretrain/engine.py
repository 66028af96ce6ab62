"""Megatron's schedule and DeepSpeed's ZeRO behind one small interface.

The schedule runs forward and backward over the micro batches and the pipeline; DeepSpeed reduces over the
data-parallel ranks, clips and steps. Loss and gradient are sums over the unmasked tokens divided by the whole global
batch's count, in any layout.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext import ModelSettings, build_model
from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.deepspeed_compat import (
    accumulated_gradient,
    finish_backward,
    global_norm,
    initialize_zero,
    step_with_norm,
)
from pretrain.monitor.stopwatch import Stopwatch
from pretrain.parallel import DeepSpeedMpu, Place, seed_step


@dataclass(frozen=True)
class Measured:
    """What is known of a step before its update, on the host and the same on all ranks.

    Attributes:
        loss: of the whole global batch, nats per token.
        grad_norm: global norm of the gradient before the clip; inf where it is not finite.
    """

    loss: float
    grad_norm: float

    @property
    def finite(self) -> bool:
        """Whether both are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Engine:
    """The model of this process and its optimizer.

    Attributes:
        module: this pipeline stage's model.
        templates: parameter -> its place in the global tensors, for checkpoints; taken before ZeRO flattens them.
        deepspeed: DeepSpeed's engine.
        stopwatch: of forward and backward passes alone, before this rank waits for others of its group.
    """

    def __init__(
        self,
        config: Config,
        model: ModelSettings,
        token_counts: Sequence[int] | None,
        place: Place,
        eod_id: int | None = None,
    ) -> None:
        """Build both; documents are kept apart behind each token ``eod_id``, or not at all."""
        self.place = place
        self.stopwatch = Stopwatch(place.device)
        self._eod_id = eod_id
        self._sequence_length = model.sequence_length
        self._micro_batch = config.train.micro_batch
        self._dropout, self._seed = model.dropout, config.train.seed
        bf16 = config.train.precision == "bf16"
        self.module = build_model(
            model,
            config.parallel,
            dtype=torch.bfloat16 if bf16 else torch.float32,
            device=place.device,
            seed=config.train.seed,
            token_counts=token_counts,
        )
        self._norm: torch.Tensor | None = None
        self.templates = sharding_templates(self.module)
        for parameter in self.module.parameters():
            if getattr(parameter, "shared", False):
                parameter.ds_pipe_replicated = True  # type: ignore[attr-defined] # counted once in the norm
        self.deepspeed = initialize_zero(
            self.module,
            config.optimizer,
            DeepSpeedMpu(),
            batch=config.train.global_batch // place.dp_size,
            bf16=bf16,
        )

    def forward_backward(self, micro_batches: Sequence[MicroBatch], step: int = 0) -> torch.Tensor:
        """Accumulate a step's gradients.

        Args:
            micro_batches: of this data-parallel rank.
            step: number of the step, which decides dropout's masks.

        Returns:
            fp32 scalar on the device: this rank's share of the step's loss (nats per token); the shares of all
            data-parallel ranks and stages add up to it (see :meth:`sum_shares`).
        """
        batches = self._prepare(micro_batches)
        tokens = torch.stack([batch.loss_mask.sum() for batch in batches]).sum()
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        tokens.clamp_(min=1.0)
        if self._dropout:
            seed_step(self.place, self._seed, step)
        with self.stopwatch.lap():
            sums = self._run_schedule(batches, tokens)
        share = torch.stack(sums).sum() / tokens if sums else torch.zeros((), device=self.place.device)
        finish_backward(self.deepspeed)
        self._sum_replicated_gradients()
        self.deepspeed.allreduce_gradients()
        self._norm = None
        return share

    def grad_norm(self) -> torch.Tensor:
        """Global norm of the last gradient before the clip, fp32 scalar, inf where it is not finite; collective.

        It is computed once, before the update, and shared with the clip.
        """
        if self._norm is None:
            self._norm = global_norm(self.deepspeed)
        return self._norm

    def measure(self, share: torch.Tensor) -> Measured:
        """Loss and gradient norm, of which ``share`` is what :meth:`forward_backward` gave; collective.

        This is the step's one transfer from the device: DeepSpeed clips with the norm on the host.
        """
        pair = torch.stack([share.float(), self.grad_norm()])
        # Added up over all ranks: tp ranks have the same loss, and all ranks the same norm up to its last bit.
        if self.place.tp_rank != 0:
            pair[0] = 0.0
        if self.place.global_rank != 0:
            pair[1] = 0.0
        dist.all_reduce(pair)
        on_host = pair.cpu()
        self._norm = on_host[1]
        return Measured(*on_host.tolist())

    def step(self, lr: float) -> None:
        """Clip, update the weights with learning rate ``lr`` and clear the gradients; :meth:`skip` if not finite."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr
        step_with_norm(self.deepspeed, self.grad_norm())

    def skip(self) -> None:
        """Clear the gradients and leave weights and optimizer as they are, as DeepSpeed does with an infinite norm."""
        step_with_norm(self.deepspeed, torch.tensor(torch.inf))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Mean loss over the unmasked tokens of all ranks' ``micro_batches``, nats per token; without dropout."""
        loss = self.evaluate_unless([micro_batches], lambda: False)
        assert loss is not None
        return loss

    @torch.no_grad()
    def evaluate_unless(self, parts: Sequence[Sequence[MicroBatch]], leave: Callable[[], bool]) -> float | None:
        """:meth:`evaluate` over all ``parts``, or None if ``leave``, asked before each, says so on all ranks."""
        tokens, sums = torch.zeros((), device=self.place.device), list[torch.Tensor]()
        was_training = self.module.training
        self.module.eval()
        try:
            for part in parts:
                if leave():
                    return None
                batches = self._prepare(part)
                tokens += torch.stack([batch.loss_mask.sum() for batch in batches]).sum()
                sums += self._run_schedule(batches, None)
        finally:
            self.module.train(was_training)
        total = torch.stack(sums).sum() if sums else torch.zeros((), device=self.place.device)
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        return float(self.sum_shares(total) / tokens)

    @torch.no_grad()
    def losses(self, micro_batches: Sequence[MicroBatch]) -> list[float]:
        """Mean loss of each micro batch, nats per token, without dropout; empty but on the last pipeline stage."""
        was_training = self.module.training
        self.module.eval()
        try:
            batches = self._prepare(micro_batches)
            sums = self._run_schedule(batches, None)
        finally:
            self.module.train(was_training)
        return [float(total / batch.loss_mask.sum().clamp(min=1)) for total, batch in zip(sums, batches, strict=False)]

    def sum_shares(self, shares: torch.Tensor) -> torch.Tensor:
        """Sum of ``shares`` (any shape) over data-parallel ranks and pipeline stages, the same on every rank."""
        total = shares.clone()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        return total

    def answers_for(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this rank counts and writes its ``parameter``: of several copies in the model one does.

        Parameters replicated over tp are tp rank 0's, a tied embedding is the first stage's.
        """
        if getattr(parameter, "shared", False):
            return False
        return bool(getattr(parameter, "tensor_model_parallel", False)) or self.place.tp_rank == 0

    def count_parameters(self) -> int:
        """Parameters of the whole model as this layout holds it (vocabulary padding included); collective."""
        held = [parameter.numel() for parameter in self.module.parameters() if self.answers_for(parameter)]
        count = torch.tensor(sum(held), device=self.place.device)
        dist.all_reduce(count, group=parallel_state.get_model_parallel_group())
        return int(count)

    def _prepare(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro batches on the device, with their documents if these are kept apart."""
        if self._eod_id is not None:
            micro_batches = [batch.with_documents(self._eod_id) for batch in micro_batches]
        return [batch.to(self.place.device) for batch in micro_batches]

    def _run_schedule(self, batches: Sequence[MicroBatch], tokens: torch.Tensor | None) -> list[torch.Tensor]:
        """One pass of Megatron's schedule, backward too if ``tokens``; loss sums per micro batch on the last stage."""
        scale = None if tokens is None else self.place.dp_size / tokens  # DeepSpeed averages over data-parallel ranks

        def forward_step(batches: Iterator[MicroBatch], module: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            batch = next(batches)
            output = module(
                batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.documents
            )

            def loss(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                total = (per_token.float() * batch.loss_mask).sum()
                # Three values: with two the schedule would divide by the number of micro batches.
                return total if scale is None else total * scale, batch.loss_mask.sum().int(), total.detach().clone()

            return output, loss

        schedule = get_forward_backward_func()
        results = schedule(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=self.module,
            num_microbatches=len(batches),
            seq_length=self._sequence_length,
            micro_batch_size=self._micro_batch,
            forward_only=tokens is None,
        )
        return list(results)

    def _sum_replicated_gradients(self) -> None:
        """Complete the gradients of parameters that several model-parallel ranks hold whole.

        A parameter that each tp rank applies to its own tokens or heads has a partial sum there. A tied embedding has
        one copy on the first and one on the last stage.
        """
        for parameter in self.module.parameters():
            if parameter.partial_over_tp:  # type: ignore[attr-defined]
                _all_reduce_gradient(parameter, parallel_state.get_tensor_model_parallel_group())
        if (
            self.module.share_embeddings_and_output_weights
            and parallel_state.get_pipeline_model_parallel_world_size() > 1
            and (self.module.pre_process or self.module.post_process)
        ):
            tied = self.module.shared_embedding_or_output_weight()  # type: ignore[operator]
            _all_reduce_gradient(tied, parallel_state.get_embedding_group())


def sharding_templates(module: torch.nn.Module) -> dict[torch.nn.Parameter, Any]:
    """Parameter -> its ShardedTensor (or factory of several): where the local part lies in the global tensor."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "non_homogeneous_layers": True,  # layers differ: the first holds the entry of the stream
    }
    parameters = {id(parameter): parameter for parameter in module.parameters()}
    templates = {
        parameters[id(value.data)]: value
        for value in module.sharded_state_dict(metadata=metadata).values()  # type: ignore[operator]
        if isinstance(value, (ShardedTensor, ShardedTensorFactory)) and id(value.data) in parameters
    }
    missing = [name for name, parameter in module.named_parameters() if parameter not in templates]
    assert not missing, f"no place in the checkpoint for {missing}"
    return templates


def _all_reduce_gradient(parameter: torch.nn.Parameter, group: dist.ProcessGroup) -> None:
    gradient = accumulated_gradient(parameter)
    assert gradient is not None, "a replicated parameter took no part in the step"
    dist.all_reduce(gradient, group=group)
