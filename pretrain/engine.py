"""Megatron's schedule and DeepSpeed's ZeRO behind one small interface.

The schedule runs forward and backward over the micro batches and the pipeline; DeepSpeed reduces over the
data-parallel ranks, clips and steps. Loss and gradient are sums over the unmasked tokens divided by the whole global
batch's count, in any layout.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_ext import ModelSettings, build_model, compile_layers, why_not_compile
from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.deepspeed_compat import global_norm, initialize_zero, step_with_norm
from pretrain.monitor.stopwatch import Stopwatch
from pretrain.parallel import AloneMpu, DeepSpeedMpu, Place, reducing_group, seed_step
from pretrain.passes import PASSES


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
        chunks: this pipeline stage's models, one for each of its virtual stages.
        module: the only one, or an nn.ModuleList of them.
        templates: parameter -> its place in the global tensors, for checkpoints; taken before ZeRO flattens them.
        shapes: parameter -> shape of its local part, which ZeRO-3 takes from the parameter itself.
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
        self._zero_stage = config.zero.stage
        self._dropout, self._seed = model.dropout, config.train.seed
        bf16 = config.train.precision == "bf16"
        vpp = config.parallel.vpp
        self.chunks = [
            build_model(
                model,
                config.parallel,
                dtype=torch.bfloat16 if bf16 else torch.float32,
                device=place.device,
                seed=config.train.seed,
                token_counts=token_counts,
                vp_stage=vp_stage if vpp > 1 else None,
            )
            for vp_stage in range(vpp)
        ]
        if config.train.compile:
            _compile(self.chunks, place)
        self.module = self.chunks[0] if vpp == 1 else torch.nn.ModuleList(self.chunks)
        self.templates = {
            parameter: pieces for chunk in self.chunks for parameter, pieces in sharding_templates(chunk).items()
        }
        self._norm: torch.Tensor | None = None
        self.shapes = {parameter: parameter.shape for parameter in self.module.parameters()}
        for parameter in self.module.parameters():
            if getattr(parameter, "shared", False):
                parameter.ds_pipe_replicated = True  # type: ignore[attr-defined] # counted once in the norm
        self.deepspeed = initialize_zero(
            self.module,
            config.optimizer,
            config.zero,
            DeepSpeedMpu() if config.zero.stage else AloneMpu(),
            batch=config.train.global_batch // place.dp_size,
            bf16=bf16,
        )
        self._passes = PASSES[config.zero.stage](self.chunks, self.deepspeed, config)

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
        dist.all_reduce(tokens, group=reducing_group())
        tokens.clamp_(min=1.0)
        if self._dropout:
            seed_step(self.place, self._seed, step)
        with self.stopwatch.lap():
            # DeepSpeed averages over these ranks.
            sums = self._passes.run(batches, reducing_group().size() / tokens)
        share = torch.stack(sums).sum() / tokens if sums else torch.zeros((), device=self.place.device)
        self._passes.complete_gradients()
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
        with self._without_dropout():
            for part in parts:
                if leave():
                    return None
                batches = self._prepare(part)
                tokens += torch.stack([batch.loss_mask.sum() for batch in batches]).sum()
                sums += self._passes.run(batches, None)
        total = torch.stack(sums).sum() if sums else torch.zeros((), device=self.place.device)
        dist.all_reduce(tokens, group=reducing_group())
        return float(self.sum_shares(total) / tokens)

    @torch.no_grad()
    def losses(self, micro_batches: Sequence[MicroBatch]) -> list[float]:
        """Mean loss of each micro batch, nats per token, without dropout; empty but on the last pipeline stage."""
        with self._without_dropout():
            batches = self._prepare(micro_batches)
            sums = self._passes.run(batches, None)
        if not sums:
            return []
        counts = [batch.loss_mask.sum() for batch in batches]
        both = torch.stack([torch.stack(sums[: len(counts)]).float(), torch.stack(counts).float()])
        dist.all_reduce(both, group=parallel_state.get_context_parallel_group())
        means: list[float] = (both[0] / both[1].clamp(min=1)).tolist()
        return means

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        was_training = self.module.training
        self.module.eval()
        try:
            yield
        finally:
            self.module.train(was_training)

    def sum_shares(self, shares: torch.Tensor) -> torch.Tensor:
        """Sum of ``shares`` (any shape) over all ranks but tensor-parallel ones, the same on every rank."""
        total = shares.clone()
        dist.all_reduce(total, group=reducing_group())
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        return total

    def answers_for(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this rank counts its ``parameter``: of several copies in the model one does.

        Parameters replicated over tp are tp rank 0's, a tied embedding is the first stage's.
        """
        if getattr(parameter, "shared", False):
            return False
        return bool(getattr(parameter, "tensor_model_parallel", False)) or self.place.tp_rank == 0

    def writes(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this rank writes its optimizer state of ``parameter``; at ZeRO 0 every other copy has all of it."""
        return self.answers_for(parameter) and (self._zero_stage > 0 or reducing_group().rank() == 0)

    def count_parameters(self) -> int:
        """Parameters of the whole model as this layout holds it (vocabulary padding included); collective."""
        held = [shape.numel() for parameter, shape in self.shapes.items() if self.answers_for(parameter)]
        count = torch.tensor(sum(held), device=self.place.device)
        dist.all_reduce(count, group=parallel_state.get_model_parallel_group())
        return int(count)

    def _prepare(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro batches on the device, with their documents if these are kept apart, cut for this rank."""
        if self._eod_id is not None:
            micro_batches = [batch.with_documents(self._eod_id) for batch in micro_batches]
        if self.place.cp_size > 1:
            micro_batches = [batch.part_of(self.place.cp_rank, self.place.cp_size) for batch in micro_batches]
        return [batch.to(self.place.device) for batch in micro_batches]


def _compile(chunks: Sequence[torch.nn.Module], place: Place) -> None:
    """Compile the layers, on all ranks or, where one of them cannot, on none; collective."""
    reasons: list[str | None] = [None] * place.world_size
    dist.all_gather_object(reasons, why_not_compile(place.device))
    failed = [(global_rank, reason) for global_rank, reason in enumerate(reasons) if reason is not None]
    if not failed:
        compile_layers(chunks)
    elif place.global_rank == 0:
        print(
            f"warning: train.compile: torch.compile does not work on global rank {failed[0][0]} ({failed[0][1]}); all "
            "layers run eager; install a C++ compiler, on GPUs Triton too, or leave it out",
            flush=True,
        )


def sharding_templates(module: torch.nn.Module) -> dict[torch.nn.Parameter, list[ShardedTensor]]:
    """Parameter -> where its local part lies in global tensors, without data; a gated MLP's two halves are two."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "non_homogeneous_layers": True,  # layers differ: the first holds the entry of the stream
    }
    parameters = {id(parameter): parameter for parameter in module.parameters()}
    templates = {
        parameters[id(value.data)]: [piece.without_data() for piece in _pieces(value)]
        for value in module.sharded_state_dict(metadata=metadata).values()  # type: ignore[operator]
        if isinstance(value, (ShardedTensor, ShardedTensorFactory)) and id(value.data) in parameters
    }
    missing = [name for name, parameter in module.named_parameters() if parameter not in templates]
    assert not missing, f"no place in the checkpoint for {missing}"
    return templates


def _pieces(value: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    return list(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
