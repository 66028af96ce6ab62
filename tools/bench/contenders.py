"""The rows of the benchmark `step`: training steps of our Engine and of plain PyTorch, built and warmed up."""

import dataclasses
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._inductor.exc import InductorError

from megatron_ext import ModelSettings, build_model
from megatron_ext.head import padded_vocab_size
from megatron_ext.initialize import global_names
from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.engine import Engine
from pretrain.errors import UserError
from pretrain.parallel import Place
from tools.bench.plain_gpt import PlainGPT, from_megatron
from tools.bench.plain_training import PlainTraining

WARM_UP_STEPS = 2
PLAIN, PRE_NORM, GEONORM = "plain", "pre_norm", "geonorm"
PLAIN_COMPILED, GEONORM_COMPILED = "plain, compiled", "geonorm, compiled"

Step = Callable[[], torch.Tensor]
"""A whole training step; its loss in nats per token."""


@dataclass(frozen=True)
class Contender:
    """One row: a training step that is ready and warm.

    Attributes:
        first_loss: of its first step, nats per token: equal where the same is computed.
        held_bytes: device memory that it keeps between steps; 0 without CUDA.
        peak_bytes: the most that it held within a step; 0 without CUDA.
    """

    step: Step
    first_loss: float
    held_bytes: int
    peak_bytes: int


def build_contenders(config: Config, place: Place, *, compiled: bool) -> dict[str, Contender]:
    """All rows in the order of their turns, warmed up."""
    batches = random_batches(config, place.device)
    starters: dict[str, Callable[[], Step]] = {
        PLAIN: lambda: start_plain(config, place, batches),
        PRE_NORM: lambda: start_engine(config, PRE_NORM, place, batches),
        GEONORM: lambda: start_engine(config, GEONORM, place, batches),
    }
    if compiled:
        starters[PLAIN_COMPILED] = lambda: start_plain(config, place, batches, compiled=True)
        ours = config.model_copy(update={"train": config.train.model_copy(update={"compile": True})})
        starters[GEONORM_COMPILED] = lambda: start_engine(ours, GEONORM, place, batches)
    return {name: warm_up(start, place.device) for name, start in starters.items()}


def start_engine(config: Config, scheme: str, place: Place, batches: Sequence[MicroBatch]) -> Step:
    """A step of our Engine with another scheme than the configuration's."""
    engine = Engine(config, with_scheme(config.model, scheme), uniform_counts(config), place)

    def step() -> torch.Tensor:
        loss = engine.forward_backward(batches)
        engine.step(config.optimizer.lr)
        return loss

    return step


def start_plain(config: Config, place: Place, batches: Sequence[MicroBatch], *, compiled: bool = False) -> Step:
    """The peer's step, from the weights that `pre_norm` starts from."""
    training = PlainTraining(build_plain(config, place.device), config.optimizer, compiled=compiled)

    def step() -> torch.Tensor:
        loss = training.forward_backward(batches)
        training.step()
        return loss

    return step


def build_plain(config: Config, device: torch.device) -> PlainGPT:
    """The plain GPT with the initial weights of `pre_norm`; Megatron-core's parallel_state must be initialised."""
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    source = build_model(
        with_scheme(config.model, PRE_NORM),
        config.parallel,
        dtype=dtype,
        device=device,
        seed=config.train.seed,
        token_counts=uniform_counts(config),
    )
    assert config.model.vocab_size is not None
    model = PlainGPT(config.model, padded_vocab_size(config.model.vocab_size, 1), dtype, device)
    model.load_state_dict(from_megatron(global_names(source), config.model))
    return model


def with_scheme(model: ModelSettings, scheme: str) -> ModelSettings:
    """The same shape under another residual scheme."""
    return dataclasses.replace(model, residual=dataclasses.replace(model.residual, scheme=scheme))


def uniform_counts(config: Config) -> list[int]:
    """Token counts of the random data."""
    assert config.model.vocab_size is not None
    return [1] * config.model.vocab_size


def random_batches(config: Config, device: torch.device) -> list[MicroBatch]:
    """A step's micro batches of random tokens on the device, none of them masked."""
    assert config.model.vocab_size is not None
    size = (config.train.micro_batch, config.model.sequence_length + 1)
    generator = torch.Generator().manual_seed(config.train.seed)
    batches = []
    for _ in range(config.train.global_batch // config.train.micro_batch):
        rows = torch.randint(0, config.model.vocab_size, size, generator=generator).to(device)
        batches.append(
            MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), torch.ones_like(rows[:, 1:]).float())
        )
    return batches


def warm_up(start: Callable[[], Step], device: torch.device) -> Contender:
    """Build one row, take its slow first steps and, on CUDA, measure the memory that is its own."""
    gc.collect()
    before = allocated(device)
    step = start()
    try:
        first_loss = float(step())
    except InductorError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--compile: torch.compile failed ({reason}); install a C++ compiler, or leave it out"
        ) from None
    for _ in range(WARM_UP_STEPS - 1):
        step()
    gc.collect()
    held = allocated(device) - before
    return Contender(step, first_loss, held, held + growth_within(step, device))


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Waits for everything that the device still computes."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def allocated(device: torch.device) -> int:
    """Bytes of device memory in tensors of all rows together; 0 without CUDA."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def growth_within(step: Step, device: torch.device) -> int:
    """Bytes that a step needs at its peak beyond what is held before it; 0 without CUDA."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
