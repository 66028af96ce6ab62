import math
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_ext import SCHEMES, ModelSettings, ParallelSettings
from megatron_ext.initialize import global_names
from megatron_ext.model import build_model
from tests.megatron_ext import reference, small

pytestmark = pytest.mark.usefixtures("single_process")

VARIANTS = {
    "plain": small.settings(),
    "gelu, layernorm, tied, learned bias": small.settings(
        activation="gelu", normalization="layernorm", tie_embeddings=True, output_bias="learned"
    ),
    "sublayer index, sqrt, free angle, no bias": small.settings(
        residual={"decay": "sqrt", "step_index": "sublayer", "clamp": "none", "alpha": 1.7}, output_bias="none"
    ),
    "every step clamped, own radius": small.settings(residual={"decay": "none", "clamp": 0.05, "radius": 3.0}),
    "linear, one query group per head": small.settings(residual={"decay": "linear"}, num_query_groups=None),
    "learned positions, biases": small.settings(positions="learned", linear_bias=True),
    "no positions, odd heads": small.settings(positions="none", hidden_size=36),
    "qk_norm": small.settings(qk_norm=True),
    "z_loss, tied": small.settings(z_loss=0.01, tie_embeddings=True),
    "qk_norm, layernorm, biases": small.settings(qk_norm=True, normalization="layernorm", linear_bias=True),
    "recomputed": small.settings(recompute="full"),
    "pre_norm, gelu, layernorm, tied": small.settings(
        "pre_norm", activation="gelu", normalization="layernorm", tie_embeddings=True
    ),
    "gpt2": small.settings("pre_norm", **small.GPT2),
    **{scheme: small.settings(scheme) for scheme in SCHEMES},
    "p below 1": small.settings("p", residual={"p": 0.5}),
    "learned alpha and angle scale": small.settings(
        residual={"learn_alpha": True, "learn_angle_scale": True, "alpha": 0.7, "angle_scale": 1.3}
    ),
    "learned angle scale, free angle, decay none": small.settings(
        residual={"learn_angle_scale": True, "clamp": "none", "decay": "none"}
    ),
    "proj, learned radius, clamp": small.settings("proj", residual={"radius": "learned", "clamp": 1.0}),
    "proj, constant alpha, harmonic over layers, update saved": small.settings(
        "proj", residual={"learn_alpha": False, "decay": "harmonic", "step_index": "layer", "save": "update"}
    ),
    "cayley, own radius, linear over sublayers, clamp": small.settings(
        "cayley", residual={"learn_alpha": False, "decay": "linear", "radius": 3.0, "clamp": 2.0}
    ),
    "p, learned angle scale, linear over layers": small.settings(
        "p", residual={"learn_angle_scale": True, "decay": "linear", "step_index": "layer"}
    ),
    "final layernorm": small.settings("proj", residual={"final_norm": "layernorm"}),
    "no final norm": small.settings("geonorm", residual={"final_norm": "none"}),
    "final rmsnorm after layernorm": small.settings(
        "ngpt_lerp",
        residual={"final_norm": "rmsnorm", "alpha": 0.3, "radius": "learned"},
        normalization="layernorm",
        qk_norm=True,
    ),
    "dyt starts": small.settings("pre_dyt", residual={"dyt_attention_alpha": 0.4, "dyt_alpha": 1.7}),
    "dyt with a scaled embedding": small.settings("pre_dyt", residual={"dyt_embedding_scale": True}),
    **{
        f"{scheme}, gelu, layernorm, biases": small.settings(
            scheme, activation="gelu", normalization="layernorm", linear_bias=True
        )
        for scheme in ("post_norm", "deep_norm", "sandwich_norm", "peri_ln", "keel", "pre_dyt")
    },
}


def reference_pass(model: ModelSettings, names: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss and gradients in fp64."""
    weights = {name: value.detach().double().requires_grad_() for name, value in names.items()}
    tokens, labels, _, loss_weights = small.batch()
    logits = reference.gpt(weights, tokens, model)
    loss = (reference.cross_entropy(logits, labels) * loss_weights).sum()
    (reference.objective(logits, labels, model) * loss_weights).sum().backward()
    return logits.detach(), loss.detach(), {name: value.grad for name, value in weights.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_a_plain_fp64_gpt_in_outputs_and_every_gradient(name: str) -> None:
    model = VARIANTS[name]
    stage = small.build(model, dtype=torch.float64)
    tokens, labels, positions, loss_weights = small.batch()
    logits = stage(tokens, positions, None)[..., : model.vocab_size]
    # Megatron-core's own loss is fp32 whatever the logits are; the z-loss keeps fp64.
    losses = stage(tokens, positions, None, labels=labels) if model.z_loss else reference.cross_entropy(logits, labels)
    (losses * loss_weights).sum().backward()

    parameters = global_names(stage)
    expected_logits, _, expected = reference_pass(model, parameters)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-11, atol=1e-11)
    assert parameters.keys() == expected.keys()
    for key, parameter in parameters.items():
        error = (parameter.grad - expected[key]).norm() / expected[key].norm()
        assert error < 1e-11, (key, error)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_training_loss_in_fp32_equals_the_fp64_reference(name: str) -> None:
    model = VARIANTS[name]
    stage = small.build(model)
    tokens, labels, positions, loss_weights = small.batch()
    losses = stage(tokens, positions, None, labels=labels)
    assert losses.shape == labels.shape
    assert losses.dtype == torch.float32
    loss = (losses * loss_weights).sum()
    loss.backward()

    parameters = global_names(stage)
    _, expected_loss, expected = reference_pass(model, parameters)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=2e-6)
    for key, parameter in parameters.items():
        error = (parameter.grad - expected[key]).norm() / expected[key].norm()
        # A single number's gradient is a sum over all tokens, most of which cancels.
        assert error < (1e-3 if parameter.numel() == 1 else 5e-5), (key, error)


BF16 = [*({"scheme": scheme} for scheme in SCHEMES), {"scheme": "pre_norm", **small.GPT2}]


@pytest.mark.parametrize("changes", BF16)
def test_bf16_is_near_the_fp64_reference(changes: dict[str, Any]) -> None:
    model = small.settings(**changes, init_std=0.1)
    stage = small.build(model, dtype=torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in stage.parameters())
    tokens, labels, positions, loss_weights = small.batch()
    losses = stage(tokens, positions, None, labels=labels)
    assert losses.dtype == torch.float32
    loss = (losses * loss_weights).sum()
    loss.backward()
    _, expected_loss, expected = reference_pass(model, global_names(stage))
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-2)
    for key, parameter in global_names(stage).items():
        cosine = torch.nn.functional.cosine_similarity(parameter.grad.double().flatten(), expected[key].flatten(), 0)
        assert cosine > 0.99, (key, cosine)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if SCHEMES[name].on_sphere])
def test_the_states_stay_on_the_sphere(scheme: str) -> None:
    stage = small.build(small.settings(scheme))
    seen: list[Tensor] = []
    for layer in stage.decoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    tokens, _, positions, _ = small.batch()
    stage(tokens, positions, None)
    assert len(seen) == 4
    for state in seen:
        torch.testing.assert_close(state.norm(dim=-1), torch.full(state.shape[:2], math.sqrt(32)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_recomputation_changes_no_gradient_and_forgets_the_activations(scheme: str) -> None:
    gradients, saved = [], []
    for recompute in ("none", "full"):
        stage = small.build(small.settings(scheme, recompute=recompute))
        tokens, labels, positions, loss_weights = small.batch()
        count = [0]
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, count=count: (count.append(x.numel()), x)[1], lambda x: x
        ):
            losses = stage(tokens, positions, None, labels=labels)
        saved.append(sum(count))
        (losses * loss_weights).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in global_names(stage).items()})
    assert saved[1] < saved[0] / 2
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.parametrize("tied", [False, True])
def test_built_on_meta_it_has_the_same_parameters(tied: bool) -> None:
    model = small.settings(tie_embeddings=tied)
    parallel = ParallelSettings()
    real, shapes = small.build(model), small.build(model, device="meta")
    assert all(parameter.is_meta for parameter in shapes.parameters())
    assert {n: (p.shape, p.dtype) for n, p in real.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in shapes.named_parameters()
    }
    without_counts = build_model(model, parallel, dtype=torch.bfloat16, device="meta", seed=0, token_counts=None)
    assert without_counts.config.bf16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "model.vocab_size is not set"),
        ({"hidden_size": 30}, "model.hidden_size is 30; it must be a multiple of model.num_attention_heads"),
        ({"num_query_groups": 3}, "model.num_attention_heads is 4; it must be a multiple of model.num_query_groups"),
        ({"scheme": "nonsense"}, "unknown residual scheme 'nonsense'; known: geonorm, "),
    ],
)
def test_refusals_name_what_to_change(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(
            small.settings(**changes), ParallelSettings(), dtype=torch.float32, device="cpu", seed=0, token_counts=[1]
        )


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelSettings(tp=4), "model.num_query_groups is 2; it must be a multiple of parallel.tp, which is 4"),
        (ParallelSettings(pp=3), r"model.num_layers is 4; it must be a multiple of parallel.pp \* parallel.vpp"),
    ],
)
def test_refusals_of_layouts(parallel: ParallelSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(small.settings(), parallel, dtype=torch.float32, device="meta", seed=0, token_counts=None)


def test_unigram_bias_without_counts_is_refused() -> None:
    with pytest.raises(ValueError, match="give token_counts, or choose 'learned' or 'none'"):
        build_model(small.settings(), ParallelSettings(), dtype=torch.float32, device="cpu", seed=0, token_counts=None)


def test_the_loss_is_per_token_in_the_config() -> None:
    config = small.config(small.settings())
    assert config.calculate_per_token_loss
    assert (config.hidden_dropout, config.attention_dropout, config.add_bias_linear) == (0.0, 0.0, False)


def trained(model: ModelSettings, seed: int = 7) -> dict[str, Tensor]:
    """Losses and gradients of one pass in training."""
    stage = small.build(model)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    tokens, labels, positions, loss_weights = small.batch()
    losses = stage(tokens, positions, None, labels=labels)
    (losses * loss_weights).sum().backward()
    return {name: parameter.grad for name, parameter in global_names(stage).items()} | {"losses": losses.detach()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.parametrize("scheme", ["geonorm", "pre_norm"])
def test_recomputation_draws_the_same_dropout_masks(scheme: str) -> None:
    plain, again, recomputed = (
        trained(small.settings(scheme, dropout=0.3, recompute=recompute)) for recompute in ("none", "none", "full")
    )
    assert equal(plain, again)
    assert equal(plain, recomputed)
    assert not equal(plain, trained(small.settings(scheme, dropout=0.3), seed=8))


def test_dropout_acts_at_its_three_places_and_in_training_only() -> None:
    tokens, _, positions, _ = small.batch()
    stage = small.build(small.settings("pre_norm", dropout=0.3))
    assert {layer.self_attention.core_attention.dropout for layer in stage.decoder.layers} == {0.3}
    kept: dict[str, float] = {}
    stage.embedding.embedding_dropout.register_forward_hook(
        lambda module, inputs, output: kept.update(embedding=(output != 0).float().mean().item())
    )
    for layer in stage.decoder.layers:
        for place, residual in (("attention", layer.self_attn_bda), ("mlp", layer.mlp_bda)):
            residual.observer = lambda module, state, increment, new, place=place: kept.update(
                {place: (increment != 0).float().mean().item()}
            )
    stage(tokens, positions, None)
    assert kept == pytest.approx({"embedding": 0.7, "attention": 0.7, "mlp": 0.7}, abs=0.05)
    without = small.build(small.settings("pre_norm")).eval()
    assert torch.equal(stage.eval()(tokens, positions, None), without(tokens, positions, None))


def test_without_dropout_nothing_is_drawn() -> None:
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    before = [torch.get_rng_state(), *tensor_parallel.get_cuda_rng_tracker().get_states().values()]
    trained(small.settings(dropout=0.0), seed=7)
    after = [torch.get_rng_state(), *tensor_parallel.get_cuda_rng_tracker().get_states().values()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert equal(trained(small.settings(dropout=0.0), seed=1), trained(small.settings(), seed=2))
