"""The peer's training step in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pretrain.config import OptimizerSettings
from pretrain.data.batch import MicroBatch
from tools.bench.plain_gpt import PlainGPT


class PlainTraining:
    """A training step as Engine does it: token-weighted loss, clip by the global norm, AdamW.

    In bf16 the optimizer holds fp32 master weights, and each micro batch's gradients are added up in fp32 as soon as
    they are there.

    Attributes:
        masters: the fp32 weights that AdamW updates, in the order of the model's parameters; the parameters
            themselves in fp32.
    """

    def __init__(self, model: PlainGPT, settings: OptimizerSettings, *, compiled: bool = False) -> None:
        self.model = model
        self.masters = list(model.parameters())
        self._forward = torch.compile(model) if compiled else model
        self._clip = settings.clip
        self._holds_masters = self.masters[0].dtype != torch.float32
        self._first_micro_batch = True
        if self._holds_masters:
            self.masters = [self._master_of(parameter) for parameter in model.parameters()]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.masters if p.dim() >= 2], "weight_decay": settings.weight_decay},
                {"params": [p for p in self.masters if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Accumulate a step's gradients in the masters' `grad`; the step's loss, fp32 scalar in nats per token."""
        tokens = torch.stack([batch.loss_mask.sum() for batch in micro_batches]).sum().clamp_min(1.0)
        losses = []
        self._first_micro_batch = True
        for batch in micro_batches:
            loss = (self._forward(batch.tokens, batch.labels) * batch.loss_mask).sum() / tokens
            loss.backward()
            losses.append(loss.detach())
            self._first_micro_batch = False
        return torch.stack(losses).sum()

    def step(self) -> None:
        """Clip, update the weights and clear the gradients."""
        if self._clip:
            nn.utils.clip_grad_norm_(self.masters, self._clip)
        self._optimizer.step()
        if self._holds_masters:
            with torch.no_grad():
                torch._foreach_copy_([*self.model.parameters()], [*self.masters])
        else:
            self._optimizer.zero_grad()

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """An fp32 copy with a gradient buffer that is kept and fills while the parameter's own gradients appear."""
        master = nn.Parameter(parameter.detach().float())
        master.grad = torch.zeros_like(master)

        def accumulate(parameter: Tensor) -> None:
            assert parameter.grad is not None
            assert master.grad is not None
            if self._first_micro_batch:
                master.grad.copy_(parameter.grad)
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)  # type: ignore[no-untyped-call]
        return master
