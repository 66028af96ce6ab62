"""One rank of the dropout test: ``OUT_FOLDER LAYOUT...``; saves what every rank dropped in a few steps."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain import parallel
from pretrain.deepspeed_compat import accumulated_gradient
from pretrain.engine import Engine
from pretrain.launch import read_launch
from tests.pretrain import tiny


def main() -> None:
    folder, layouts = Path(sys.argv[1]), sys.argv[2:]
    parallel.start(read_launch(), tiny.LAYOUTS["one"], seed=0)
    for layout in layouts:
        parallel.dissolve()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, run(layout))
        if dist.get_rank() == 0:
            torch.save(ranks, folder / f"{layout}.pt")
    parallel.stop()


def run(layout: str) -> dict[str, Any]:
    """What this rank dropped at step 3, at step 3 again, and at step 4; and what validation makes of dropout."""
    config = tiny.config(layout, model={"dropout": 0.5, "residual": {"scheme": "pre_norm"}})
    place = parallel.arrange(torch.device("cpu"), config.parallel, config.train.seed)
    engine = Engine(config, config.model, tiny.TOKEN_COUNTS, place)
    batches = tiny.micro_batches(0, 0, place.dp_size)  # the same for every data-parallel rank
    plain = tiny.config(layout, model={"residual": {"scheme": "pre_norm"}})
    undropped = Engine(plain, plain.model, tiny.TOKEN_COUNTS, place)
    losses = [engine.evaluate(batches), engine.evaluate(batches), undropped.evaluate(batches)]
    engine.module.eval()
    engine.evaluate(batches)
    stayed_in_evaluation = not engine.module.training
    engine.module.train()
    return {
        "steps": [dropped(engine, batches, step) for step in (3, 3, 4)],
        "losses": losses,
        "stayed in evaluation": stayed_in_evaluation,
        "trains": engine.module.training,
    }


def dropped(engine: Engine, batches: list[Any], step: int) -> dict[str, list[torch.Tensor]]:
    """Masks of the first layer of each of the rank's stages, one per micro batch and stage, and the gradients."""
    masks: dict[str, list[torch.Tensor]] = {"hidden": [], "attention": [], "embedding": []}
    handles = []
    for chunk in engine.chunks:
        layer = chunk.decoder.layers[0]  # type: ignore[union-attr, index]
        core = layer.self_attention.core_attention
        layer.self_attn_bda.observer = lambda residual, state, increment, new: masks["hidden"].append(increment != 0)
        handles += [
            # Every rank's heads attend to the same, so that only the masks differ.
            core.register_forward_pre_hook(lambda module, inputs: (*[x * 0 + 1 for x in inputs[:3]], *inputs[3:])),
            core.register_forward_hook(lambda m, i, output: masks["attention"].append(output.detach().clone())),
        ]
        if chunk.pre_process:
            embedding = chunk.embedding.embedding_dropout  # type: ignore[union-attr]
            handles.append(embedding.register_forward_hook(lambda m, i, output: masks["embedding"].append(output != 0)))
    engine.forward_backward(batches, step)
    for handle in handles:
        handle.remove()
    gradients = [accumulated_gradient(parameter) for parameter in engine.module.parameters()]
    masks["gradients"] = [gradient.clone() for gradient in gradients if gradient is not None]
    engine.deepspeed.optimizer.zero_grad()
    return masks


if __name__ == "__main__":
    main()
