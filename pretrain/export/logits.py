"""Whether two programs compute the same model: logits of both on random tokens, in fp32."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.errors import UserError

_ROWS, _LONGEST = 4, 128
_TOLERANCE = 1e-4
"""Of the largest logit; rounding in fp32 stays below a tenth of it, a wrong formula or weight far above."""


def random_rows(vocab_size: int, sequence_length: int) -> Tensor:
    """Tokens, int64 [rows, tokens], the same ones at every call."""
    shape = (_ROWS, min(sequence_length, _LONGEST))
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def our_logits(module: nn.Module, rows: Tensor, vocab_size: int) -> Tensor:
    """Of a whole model of ours, fp32 [rows, tokens, vocabulary] on the CPU."""
    module.eval()
    tokens = rows.to(next(module.parameters()).device)
    positions = torch.arange(rows.shape[1], device=tokens.device).expand_as(tokens)
    logits: Tensor = module(tokens, positions, None)
    return logits[..., :vocab_size].float().cpu()


@torch.no_grad()
def their_logits(model_class: Any, folder: Path, rows: Tensor, device: torch.device) -> Tensor:
    """Of a model folder of transformers, fp32 [rows, tokens, vocabulary] on the CPU.

    Raises:
        UserError: a weight is missing in the folder, or means nothing to the class.
    """
    model, report = model_class.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(fault):
            raise UserError(
                f"{folder}: {fault.replace('_', ' ')} of {model_class.__name__}: {sorted(report[fault])[:3]}"
            )
    logits: Tensor = model.to(device).eval()(rows.to(device)).logits
    return logits.float().cpu()


def require_equal(ours: Tensor, theirs: Tensor, what: str, of: str) -> tuple[float, float]:
    """Largest difference, and the largest of our logits.

    Raises:
        UserError: they differ by more than rounding.
    """
    difference, largest = float((ours - theirs).abs().max()), float(ours.abs().max())
    if not difference <= _TOLERANCE * max(largest, 1.0):  # also when one of them is no number
        raise UserError(f"{what} does not compute what {of} does: logits differ by {difference:.3g}, of {largest:.3g}")
    return difference, largest
