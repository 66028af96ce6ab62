"""What the layers of a model keep for their backward pass, counted on real tensors on the CPU, each storage once."""

from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_ext import ModelSettings, ParallelSettings, ResidualSettings, build_model
from megatron_ext.memory import SavedTensors
from megatron_ext.norms import RMSNorm
from pretrain import parallel
from pretrain.launch import read_launch
from tools.bench.report import table

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "ffn_hidden_size": 1408,
    "sequence_length": 256,
}
MICRO_BATCH = 2
PRE_NORM, TORCHS_NORM, GEONORM = "pre_norm", "pre_norm by torch's own rms_norm", "geonorm"


def run(layers: int) -> tuple[str, Any]:
    """The table and the bytes."""
    torch.set_num_threads(1)
    parallel.start(read_launch(), ParallelSettings(), 0)
    results = {
        recompute: {
            PRE_NORM: layers_keep("pre_norm", recompute, layers),
            TORCHS_NORM: layers_keep("pre_norm", recompute, layers, torchs_norm=True),
            GEONORM: layers_keep("geonorm", recompute, layers),
        }
        for recompute in ("none", "selective")
    }
    parallel.stop()
    unit = MICRO_BATCH * SHAPE["sequence_length"] * SHAPE["hidden_size"] * layers * 2
    rows = []
    for recompute, kept in results.items():
        rows.append([f"recompute {recompute}", "", "", ""])
        for name, size in kept.items():
            rows.append([f"  {name}", f"{size / 2**20:.2f}", f"{size / unit:.2f}", f"{kept[GEONORM] / size:.3f}"])
    shape = ", ".join(f"{name} {number}" for name, number in SHAPE.items())
    head = ["kept by the layers", "MiB", "states a layer", "geonorm / this"]
    return f"{table(head, rows)}\n\nbf16, micro batch {MICRO_BATCH}, {layers} layers, {shape}", results


def layers_keep(scheme: str, recompute: Any, layers: int, *, torchs_norm: bool = False) -> int:
    """Bytes from the first layer's start to the final norm."""
    model = ModelSettings(
        **SHAPE,
        num_layers=layers,
        vocab_size=128,
        output_bias="none",
        recompute=recompute,
        residual=ResidualSettings(scheme=scheme),
    )
    stage: Any = build_model(model, ParallelSettings(), dtype=torch.bfloat16, device="cpu", seed=0, token_counts=None)
    for module in stage.modules():
        if torchs_norm and isinstance(module, RMSNorm):
            module.forward = partial(nn.RMSNorm.forward, module)  # type: ignore[method-assign]
    kept = SavedTensors(stage)
    marks: list[int] = []
    for module in (stage.decoder.layers[0], stage.decoder.final_layernorm):
        module.register_forward_pre_hook(lambda module, inputs: marks.append(kept.bytes))
    positions = torch.arange(model.sequence_length).expand(MICRO_BATCH, -1)
    with kept.recording():
        stage(positions % 128, positions, None, labels=positions % 128)
    start, end = marks
    return end - start
