"""Runs as the board writes them, without training: curves that are known, a spike where it is wanted."""

import math
from pathlib import Path

import yaml

from pretrain.monitor.layout import board_layout
from pretrain.monitor.tensorboard import Board

LAYERS, TOKENS_A_STEP, SECONDS_A_STEP = 6, 1000, 36.0


def write_run(
    folder: Path, steps: int = 100, spike: int | None = None, lr: float = 1e-3, broken: int | None = None
) -> Path:
    """Losses fall from 5; at ``spike`` one is 3 higher and marked, at ``broken`` one is not a number."""
    board = Board(folder / "tensorboard", 0, 0)
    board.layout(board_layout(LAYERS, True, ["angle_attention", "angle_mlp"], ["norm"]))
    board.settings({"optimizer.lr": lr, "train.seed": 1}, ["optimizer.lr"], ["validation/loss"])
    for step in range(1, steps + 1):
        loss = math.nan if step == broken else 2 + 3 / math.sqrt(step) + 0.02 * (step % 7) + 3 * (step == spike)
        board.scalars({"train/loss": loss, "train/grad_norm": 0.5 + 10 * (step == spike), "train/lr": lr}, step)
        board.scalars_by_tokens({"train/loss_by_tokens": loss}, step * TOKENS_A_STEP, 1e9 + step * SECONDS_A_STEP)
        if step == spike:
            board.scalar("events/spike", loss, step)
            board.text("events/spike_report", f"loss <{loss:.2f}> & more", step)
        if step % 10 == 0:
            write_log_step(board, step)
    board.close()
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": {"dir": str(folder)}, "optimizer": {"lr": lr}}))
    return folder


def write_log_step(board: Board, step: int) -> None:
    values = {"validation/loss": 2.5 + 3 / math.sqrt(step), "throughput/tokens_per_second": 1e4, "throughput/mfu": 0.4}
    values |= {"throughput/tokens_per_second_per_gpu": 5e3, "throughput/model_tflops_per_gpu": 123.4}
    for layer in range(1, LAYERS + 1):
        values[f"geometry/angle_attention/layer_{layer:02d}"] = 0.5 / layer + 0.001 * step
        values[f"geometry/angle_mlp/layer_{layer:02d}"] = 0.3 / layer
        values[f"geometry/resultant_length/layer_{layer:02d}"] = 0.1 * layer
        values[f"gradients/update_ratio/layer_{layer:02d}"] = 1e-3 / layer
    board.scalars(values, step)
