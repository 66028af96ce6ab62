"""Two data-parallel ranks: prints the parameters, and the bytes that DeepSpeed and the model hold before a step."""

from typing import Any

import torch

from megatron_ext import ParallelSettings
from pretrain import parallel
from pretrain.engine import Engine
from pretrain.launch import read_launch
from tests.pretrain import tiny


def held_bytes(engine: Engine) -> int:
    """Of the distinct storages that are reachable from model and optimizer."""
    optimizer: Any = engine.deepspeed.optimizer
    tensors = _tensors(list(engine.module.parameters()))
    for value in vars(optimizer).values():
        tensors += _tensors(value)
    for state in optimizer.optimizer.state.values():
        tensors += _tensors(list(state.values()))
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value, *_tensors(value.grad)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return _tensors(list(value.values())) if isinstance(value, dict) else []


def main() -> None:
    place = parallel.start(read_launch(), ParallelSettings(), seed=0)
    found = []
    for precision in ("bf16", "fp32"):
        config = tiny.config("dp2", train={"precision": precision})
        engine = Engine(config, config.model, tiny.TOKEN_COUNTS, place)
        for step in range(2):
            if step:
                engine.step(1e-3)
            engine.forward_backward(tiny.micro_batches(step, place.dp_rank, place.dp_size))
        found.append(held_bytes(engine))
    print(sum(parameter.numel() for parameter in engine.module.parameters()), *found)
    parallel.stop()


if __name__ == "__main__":
    main()
