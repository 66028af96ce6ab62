"""Checks of the benchmarks' peer against our Engine, in one process; an assertion ends it with its traceback."""

from dataclasses import replace

import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from megatron_ext.head import padded_vocab_size
from megatron_ext.initialize import global_names
from pretrain import parallel
from pretrain.config import Config
from pretrain.engine import Engine
from pretrain.launch import read_launch
from tests.pretrain import tiny
from tools.bench.contenders import build_plain, uniform_counts
from tools.bench.plain_gpt import from_megatron
from tools.bench.plain_training import PlainTraining

PLACE = parallel.start(read_launch(), tiny.LAYOUTS["one"], seed=0)
LR = 3e-3


def config(precision: str) -> Config:
    """Grouped queries, a padded vocabulary and a clip that bites; a large epsilon keeps Adam's update smooth."""
    return tiny.config(
        "one",
        model={"residual": {"scheme": "pre_norm"}},
        train={"precision": precision},
        optimizer={"lr": LR, "epsilon": 1e-3, "clip": 0.1},
    )


def pair(settings: Config) -> tuple[Engine, PlainTraining]:
    """Both with the same initial weights."""
    engine = Engine(settings, settings.model, uniform_counts(settings), PLACE)
    plain = PlainTraining(build_plain(settings, PLACE.device), settings.optimizer)
    return engine, plain


def weights(engine: Engine) -> dict[str, Tensor]:
    """Our weights by the plain model's names and in its layout."""
    return from_megatron({name: p.detach() for name, p in global_names(engine.module).items()}, config("fp32").model)


def gradients(engine: Engine) -> dict[str, Tensor]:
    """Our gradients likewise, before the clip."""
    found = {name: safe_get_full_grad(parameter) for name, parameter in global_names(engine.module).items()}
    return from_megatron(found, config("fp32").model)


def assert_close(ours: dict[str, Tensor], plain: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == plain.keys()
    for name, tensor in plain.items():
        scale = float(tensor.float().norm())
        difference = float((ours[name].float() - tensor.float()).norm())
        assert scale > 0, name
        assert difference <= tolerance * scale, f"{name}: {difference / scale:.2e}"


def masters(plain: PlainTraining) -> dict[str, Tensor]:
    names = [name for name, _ in plain.model.named_parameters()]
    return dict(zip(names, plain.masters, strict=True))


def fp32_loss_gradients_and_update_agree() -> None:
    engine, plain = pair(config("fp32"))
    for step in range(3):  # the first one moves norms and biases off the ones and equal numbers they start from
        batches = tiny.micro_batches(step, 0, 1)
        before = {name: parameter.detach().clone() for name, parameter in plain.model.named_parameters()}
        ours, theirs = engine.forward_backward(batches), plain.forward_backward(batches)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        assert_close(gradients(engine), {name: p.grad for name, p in plain.model.named_parameters()}, 1e-5)
        engine.step(LR)
        plain.step()
        assert float(engine.grad_norm()) > 0.1, "the clip had nothing to do"
        after = weights(engine)
        changes = {name: p.detach() - before[name] for name, p in plain.model.named_parameters()}
        assert_close({name: after[name] - before[name] for name in before}, changes, 1e-4 if step else 1e-5)


def bf16_gradients_add_up_in_fp32() -> None:
    """Bit for bit the fp32 sum of what each micro batch gives alone; the masters are rounded to the weights."""
    _, plain = pair(config("bf16"))
    batches = [replace(batch, loss_mask=torch.ones_like(batch.loss_mask)) for batch in tiny.micro_batches(0, 0, 1)]
    expected: dict[str, Tensor] = {}
    for batch in batches:
        plain.forward_backward([batch])
        for name, master in masters(plain).items():
            assert master.grad.dtype == torch.float32
            # A quarter is exact in binary: alone, each micro batch has four times its weight.
            expected[name] = expected.get(name, torch.zeros_like(master)) + master.grad / 4
    plain.forward_backward(batches)
    for name, master in masters(plain).items():
        assert torch.equal(master.grad, expected[name]), name
    plain.step()
    for name, parameter in plain.model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.grad is None
        assert torch.equal(parameter.detach(), masters(plain)[name].detach().bfloat16()), name


def bf16_training_stays_close() -> None:
    engine, plain = pair(config("bf16"))
    for step in range(5):
        batches = tiny.micro_batches(step, 0, 1)
        torch.testing.assert_close(engine.forward_backward(batches), plain.forward_backward(batches), rtol=2e-3, atol=0)
        assert_close(gradients(engine), {name: master.grad for name, master in masters(plain).items()}, 0.05)
        engine.step(LR)
        plain.step()


def padding_is_alike() -> None:
    engine, plain = pair(config("fp32"))
    rows = padded_vocab_size(tiny.VOCAB, 1)
    assert rows > tiny.VOCAB
    assert plain.model.output.weight.shape == engine.module.output_layer.weight.shape == (rows, 64)
    ours, theirs = (sum(p.numel() for p in model.parameters()) for model in (engine.module, plain.model))
    assert ours == theirs


def main() -> None:
    fp32_loss_gradients_and_update_agree()
    bf16_gradients_add_up_in_fp32()
    bf16_training_stays_close()
    padding_is_alike()
    print("all checks passed")


if __name__ == "__main__":
    main()
