"""Checks on one engine at a time in one process; an assertion ends the process with its traceback."""

from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from megatron_ext.initialize import global_names
from pretrain import parallel
from pretrain.data.batch import MicroBatch
from pretrain.deepspeed_compat import (
    accumulated_gradient,
    adam_step,
    create_adam_state,
    finish_load,
    owned_fragment,
    owned_range,
)
from pretrain.engine import Engine
from pretrain.launch import read_launch
from tests.megatron_ext import reference
from tests.pretrain import tiny

PLACE = parallel.start(read_launch(), tiny.LAYOUTS["one"], seed=0)


def engine(**sections: dict) -> Engine:
    config = tiny.config("one", **sections)
    return Engine(config, config.model, tiny.TOKEN_COUNTS, PLACE)


def full_batches(count: int) -> list[MicroBatch]:
    """Micro batches without a masked token, so that all count alike."""
    rows = torch.randint(0, tiny.VOCAB, (count, 2, tiny.SEQUENCE + 1), generator=torch.Generator().manual_seed(5))
    return [MicroBatch(r[:, :-1].contiguous(), r[:, 1:].contiguous(), torch.ones(2, tiny.SEQUENCE)) for r in rows]


def gradients(trained: Engine) -> dict[str, torch.Tensor]:
    found = {name: accumulated_gradient(p) for name, p in global_names(trained.module).items()}
    return {name: gradient.detach().clone() for name, gradient in found.items() if gradient is not None}


def bf16_gradients_add_up_in_fp32() -> None:
    """Bit for bit the fp32 sum of what each micro batch gives alone; a quarter of each is exact in binary."""
    trained = engine(train={"precision": "bf16"})
    batches = full_batches(4)
    expected: dict[str, torch.Tensor] = {}
    for batch in batches:
        trained.forward_backward([batch])
        for name, gradient in gradients(trained).items():
            assert gradient.dtype == torch.float32
            expected[name] = expected.get(name, torch.zeros_like(gradient)) + gradient / 4
        trained.deepspeed.optimizer.zero_grad()
    trained.forward_backward(batches)
    for name, gradient in gradients(trained).items():
        assert torch.equal(gradient, expected[name]), name


def a_step_without_a_counted_token_changes_nothing_but_decay() -> None:
    trained = engine(optimizer={"lr": 1e-2, "weight_decay": 0.0})
    before = [parameter.detach().clone() for parameter in trained.module.parameters()]
    batch = full_batches(1)[0]
    share = trained.forward_backward([MicroBatch(batch.tokens, batch.labels, torch.zeros_like(batch.loss_mask))])
    trained.step(1e-2)
    assert float(share) == 0.0
    assert float(trained.grad_norm()) == 0.0
    for parameter, old in zip(trained.module.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def only_matrices_decay() -> None:
    trained = engine(
        optimizer={"weight_decay": 0.5, "clip": 0.0},
        model={"positions": "learned", "linear_bias": True, "qk_norm": True, "normalization": "layernorm"},
    )
    create_adam_state(trained.deepspeed)
    for parameter in trained.module.parameters():
        owned_fragment(parameter, "fp32").add_(0.1)  # biases start at zero, where a decay would not show
    finish_load(trained.deepspeed, 0)
    batch = full_batches(1)[0]
    before = {name: p.detach().clone() for name, p in global_names(trained.module).items()}
    trained.forward_backward([MicroBatch(batch.tokens, batch.labels, torch.zeros_like(batch.loss_mask))])
    trained.step(0.1)
    for name, parameter in global_names(trained.module).items():
        factor = 1 - 0.1 * 0.5 if parameter.dim() >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def a_step_that_is_not_finite_is_skipped_and_told(precision: str, stage: int, offload: bool = False) -> None:
    zero = {"stage": stage, "offload_optimizer": offload}
    trained = engine(train={"precision": precision}, zero=zero)
    batches = full_batches(2)
    trained.forward_backward(batches)
    trained.step(1e-3)
    before = masters(trained)
    poisoned = MicroBatch(batches[0].tokens, batches[0].labels, batches[0].loss_mask * float("nan"))
    share = trained.forward_backward([poisoned, batches[1]])
    trained.step(1e-3)
    assert not torch.isfinite(share)
    assert torch.isinf(trained.grad_norm())
    assert adam_step(trained.deepspeed) == 1
    for name, master in masters(trained).items():
        assert torch.equal(master, before[name]), name
    trained.forward_backward(batches)
    trained.step(1e-3)
    assert torch.isfinite(trained.grad_norm())
    assert not torch.equal(masters(trained)["output_layer.weight"], before["output_layer.weight"])


def masters(trained: Engine) -> dict[str, torch.Tensor]:
    return {name: owned_fragment(p, "fp32").clone() for name, p in global_names(trained.module).items()}


def a_skipped_step_leaves_weights_and_optimizer(precision: str, stage: int, offload: bool) -> None:
    """Bit for bit, and its gradients are gone: the next step is as if it had never been."""
    zero = {"stage": stage, "offload_optimizer": offload}
    trained, twin = (engine(train={"precision": precision}, zero=zero) for _ in range(2))
    batches = full_batches(4)
    for one in (trained, twin):
        one.forward_backward(batches[:2])
        one.step(1e-3)
    before = state_of(trained)
    trained.measure(trained.forward_backward(batches[2:]))
    trained.skip()
    assert all(torch.equal(now, old) for now, old in zip(state_of(trained), before, strict=True))
    assert adam_step(trained.deepspeed) == 1
    for one in (trained, twin):
        one.measure(one.forward_backward(batches[1:3]))
        one.step(1e-3)
    assert all(torch.equal(now, other) for now, other in zip(state_of(trained), state_of(twin), strict=True))


def state_of(trained: Engine) -> list[torch.Tensor]:
    create_adam_state(trained.deepspeed)  # links what DeepSpeed left unlinked
    return [
        owned_fragment(parameter, name).clone()
        for parameter in trained.module.parameters()
        for name in ("fp32", "exp_avg", "exp_avg_sq")
        if owned_range(parameter)
    ]


def finder_of_the_norm(optimizer: Any) -> tuple[Any, str]:
    if isinstance(optimizer, bf16_optimizer.BF16_Optimizer):
        return bf16_optimizer, "get_global_norm_of_tensors"
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return DeepSpeedZeroOptimizer_Stage3, "_get_norm_groups"
    return DeepSpeedZeroOptimizer, "scaled_global_norm"


def the_norm_is_computed_once_and_is_deepspeed_s_own(precision: str, stage: int, offload: bool) -> None:
    """Whether it was looked at before the update or not, the update is the same bit for bit."""
    zero = {"stage": stage, "offload_optimizer": offload}
    measured, plain = (engine(train={"precision": precision}, zero=zero) for _ in range(2))
    batches = full_batches(4)
    owner, name = finder_of_the_norm(measured.deepspeed.optimizer)
    with patch.object(owner, name, autospec=True, side_effect=getattr(owner, name)) as counted:
        result = measured.measure(measured.forward_backward(batches))
        measured.step(1e-3)
        assert counted.call_count == 1
        share = plain.forward_backward(batches)
        for group in plain.deepspeed.optimizer.param_groups:
            group["lr"] = 1e-3
        plain.deepspeed.step()
        assert counted.call_count == 2, "DeepSpeed no longer computes its norm there"
    own = torch.as_tensor(plain.deepspeed.get_global_grad_norm())
    assert result.grad_norm == float(own.float())
    assert result.loss == float(share)
    # Stage 3 has its norm in fp64, which may turn the last bit of an update.
    spare = 1e-6 if own.dtype == torch.float64 else 0.0
    for ours, theirs in zip(state_of(measured), state_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=spare, atol=spare)


def every_parameter_moves_at_the_rate_of_the_step() -> None:
    """Adam's first update is the learning rate times the gradient's sign."""
    trained = engine(optimizer={"weight_decay": 0.0, "epsilon": 1e-20, "beta1": 0.7, "beta2": 0.8})
    assert {group["betas"] for group in trained.deepspeed.optimizer.param_groups} == {(0.7, 0.8)}
    before = {name: p.detach().clone() for name, p in global_names(trained.module).items()}
    trained.forward_backward(full_batches(4))
    trained.step(0.125)
    for name, parameter in global_names(trained.module).items():
        moved = (parameter.detach() - before[name]).abs()
        torch.testing.assert_close(moved[moved > 0], torch.full_like(moved[moved > 0], 0.125), rtol=1e-3, atol=0)
        assert moved.any(), name


def the_clip_bounds_the_update() -> None:
    """After one Adam step the first moment is (1 - beta1) times the clipped gradient."""
    trained = engine(optimizer={"clip": 0.01, "beta1": 0.9})
    create_adam_state(trained.deepspeed)
    trained.forward_backward(full_batches(1))
    trained.step(1e-3)
    assert float(trained.grad_norm()) > 0.1
    squares = sum(
        float(owned_fragment(p, "exp_avg").double().pow(2).sum()) for p in trained.module.parameters() if owned_range(p)
    )
    assert abs(squares**0.5 / 0.1 - 0.01) < 1e-4


def fresh_adam_state_is_linked_for_every_parameter() -> None:
    """DeepSpeed links the state after its first group only; a checkpoint of a fresh engine needs all."""
    trained = engine()
    create_adam_state(trained.deepspeed)
    for parameter in trained.module.parameters():
        for name in ("fp32", "exp_avg", "exp_avg_sq"):
            assert owned_fragment(parameter, name).numel() == parameter.numel()


def documents_are_kept_apart_in_training_and_validation() -> None:
    """The loss of a plain fp64 model with a dense mask, over all tokens; another one where samples are whole."""
    config = tiny.config("one")
    for eod_id in (tiny.EOD, None):
        trained = Engine(config, config.model, tiny.TOKEN_COUNTS, PLACE, eod_id)
        batches = tiny.micro_batches(0, 0, 1, ends_below=40)
        expected = {divide: reference_loss(trained, batches, divide) for divide in (tiny.EOD, None)}
        assert abs(expected[tiny.EOD] - expected[None]) > 1e-4
        for loss in (trained.evaluate(batches), float(trained.forward_backward(batches))):
            assert abs(loss - expected[eod_id]) < 2e-6, (eod_id, loss, expected)


def reference_loss(trained: Engine, batches: list[MicroBatch], eod_id: int | None) -> float:
    weights = {name: parameter.detach().double() for name, parameter in global_names(trained.module).items()}
    total, count = 0.0, 0.0
    for batch in batches:
        logits = reference.gpt(weights, batch.tokens, tiny.config("one").model, eod_id)
        total += float((reference.cross_entropy(logits, batch.labels) * batch.loss_mask).sum())
        count += float(batch.loss_mask.sum())
    return total / count


def main() -> None:
    documents_are_kept_apart_in_training_and_validation()
    bf16_gradients_add_up_in_fp32()
    a_step_without_a_counted_token_changes_nothing_but_decay()
    only_matrices_decay()
    for stage in (0, 1, 2, 3):
        for precision, offload in (("fp32", False), ("bf16", False), ("bf16", True)):
            a_step_that_is_not_finite_is_skipped_and_told(precision, stage, offload)
            a_skipped_step_leaves_weights_and_optimizer(precision, stage, offload)
            the_norm_is_computed_once_and_is_deepspeed_s_own(precision, stage, offload)
    every_parameter_moves_at_the_rate_of_the_step()
    the_clip_bounds_the_update()
    fresh_adam_state_is_linked_for_every_parameter()
    print("all checks passed")


if __name__ == "__main__":
    main()
