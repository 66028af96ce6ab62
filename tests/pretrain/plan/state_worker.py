"""Two data-parallel ranks: the bytes that DeepSpeed and the model hold, by kind, ZeRO stage and precision.

Prints one JSON object: the parameters of a rank, and for each ``precision stage`` weights, gradients, optimizer.
"""

import json
from collections.abc import Iterable
from typing import Any

import torch

from megatron_ext import ParallelSettings
from pretrain import parallel
from pretrain.deepspeed_compat import owned_fragment, owned_range
from pretrain.engine import Engine
from pretrain.launch import read_launch
from tests.pretrain import tiny

# So large that paddings, and parameters that ZeRO-3 keeps whole, weigh nothing.
MODEL = {"num_layers": 2, "hidden_size": 256, "num_query_groups": 4, "ffn_hidden_size": 512}


def stored(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    """Address -> bytes of the distinct storages."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in flat(item)]
    return flat(list(value.values())) if isinstance(value, dict) else []


def held_bytes(engine: Engine) -> tuple[int, int, int]:
    """Weights, gradients and optimizer state that are reachable from model and optimizer before a step."""
    optimizer: Any = engine.deepspeed.optimizer
    parameters: list[Any] = list(engine.module.parameters())
    weights = stored([*parameters, *(getattr(p, "ds_tensor", None) for p in parameters)])
    states = [list(state.values()) for state in optimizer.optimizer.state.values()]
    masters = [owned_fragment(p, "fp32") for p in parameters if owned_range(p)]
    kept = stored([*flat(states), *masters])
    everything = [tensor for value in vars(optimizer).values() for tensor in flat(value)]
    everything += [tensor.grad for tensor in [*everything, *parameters] if tensor.grad is not None]
    everything += [getattr(p, "grad_accum", None) for p in parameters]
    buckets = stored(
        tensor for bucket in getattr(optimizer, "ipg_buckets", {}).values() for tensor in flat(bucket.buffer)
    )
    others = {place: size for place, size in stored(everything).items() if place not in weights | kept | buckets}
    return sum(weights.values()), sum(others.values()), sum(kept.values())


def main() -> None:
    place = parallel.start(read_launch(), ParallelSettings(), seed=0)
    found: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        for precision in ("bf16", "fp32"):
            config = tiny.config("dp2", model=MODEL, train={"precision": precision}, zero={"stage": stage})
            engine = Engine(config, config.model, tiny.TOKEN_COUNTS, place)
            for step in range(2):
                if step:
                    engine.step(1e-3)
                engine.forward_backward(tiny.micro_batches(step, place.dp_rank, place.dp_size))
            found[f"{precision} {stage}"] = held_bytes(engine)
    found["parameters"] = sum(shape.numel() for shape in engine.shapes.values())
    print(json.dumps(found))
    parallel.stop()


if __name__ == "__main__":
    main()
