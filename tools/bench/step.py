"""Time one training step: the schemes in our Engine against a GPT of the same size in plain PyTorch.

A step is forward and backward over the micro batches, gradient reduction, clip and AdamW; fetching is left out. Runs in
one process, on the GPU where CUDA is, but for --two-ranks. Unless --kernels says so, nothing of ours is compiled, so
the peer is not; --compile adds a peer that is, and geonorm with train.compile.
"""

import argparse
from dataclasses import dataclass

from tools.arguments import positive_int
from tools.bench.report import Report

MICRO_BATCHES = 2  # a step accumulates


@dataclass(frozen=True)
class Preset:
    """A size: a file in configs/ and the settings that replace its own."""

    config: str
    overrides: tuple[str, ...] = ()


PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        "demo.yaml",
        (
            *("model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.ffn_hidden_size=176"),
            *("model.sequence_length=64", "model.vocab_size=300", "train.micro_batch=2"),
        ),
    ),
    "demo": Preset("demo.yaml", ("model.vocab_size=2048",)),  # the vocabulary of tools/demo.sh
    "125m": Preset("geonorm_125m.yaml"),
    "1p3b": Preset("geonorm_1p3b.yaml"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--preset", choices=PRESETS, default="demo", help="size of the model (default: demo)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="default: bf16")
    parser.add_argument(
        "--rounds", type=positive_int, default=9, metavar="N", help="timed steps of each row (default: 9)"
    )
    parser.add_argument(
        "--micro-batch", type=positive_int, metavar="N", help=f"samples, of which a step takes {MICRO_BATCHES} times N"
    )
    parser.add_argument(
        "--kernels",
        choices=("auto", "eager", "compiled", "triton"),
        default="auto",
        help="model.kernels of our rows (default: auto)",
    )
    parser.add_argument(
        "--two-ranks",
        action="store_true",
        help="two more rows: geonorm on two processes of one thread, or one GPU, each, tp2 and dp2",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="two more rows under torch.compile: the plain model, and geonorm's layers",
    )


def run(arguments: argparse.Namespace) -> Report:
    """See :func:`tools.bench.step_timing.run`."""
    from tools.bench import step_timing  # late: Megatron-core and DeepSpeed take seconds to import

    return step_timing.run(arguments)
