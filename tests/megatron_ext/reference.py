"""A whole GPT in plain PyTorch, written from the formulas, for Megatron-core's layout of the weights."""

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import ModelSettings
from megatron_ext.schemes import with_defaults

Weights = dict[str, Tensor]


def gpt(weights: Weights, tokens: Tensor, model: ModelSettings) -> Tensor:
    """Logits [batch, sequence, vocabulary without padding] of tokens [batch, sequence]."""
    model = dataclasses.replace(model, residual=with_defaults(model.residual))
    embedding = weights["embedding.word_embeddings.weight"]
    x = embedding[tokens]
    if model.positions == "learned":
        x = x + weights["embedding.position_embeddings.weight"][: tokens.shape[1]]
    sphere = model.residual.scheme == "geonorm"
    if sphere:
        x = radius(model) * x / x.norm(dim=-1, keepdim=True)
    for index in range(model.num_layers):
        prefix = f"decoder.layers.{index}."
        layer = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        sublayers: list[tuple[str, Callable[[Weights, Tensor, ModelSettings], Tensor]]] = [
            ("input_layernorm", attention),
            ("pre_mlp_layernorm", mlp),
        ]
        for number, (norm_name, sublayer) in enumerate(sublayers):
            if sphere:
                x = geodesic(x, sublayer(layer, x, model), *step(model, index, number))
            else:
                x = x + sublayer(layer, norm(layer, norm_name, x, model), model)
    x = norm(weights, "decoder.final_layernorm", x, model)
    logits = linear(weights | {"output_layer.weight": weights.get("output_layer.weight", embedding)}, "output_layer", x)
    return logits[..., : model.vocab_size]


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))


def radius(model: ModelSettings) -> float:
    return math.sqrt(model.hidden_size) if model.residual.radius == "sqrt_hidden" else model.residual.radius


def step(model: ModelSettings, layer: int, sublayer: int) -> tuple[float, float]:
    """alpha and the clamp."""
    by_layer = model.residual.step_index == "layer"
    k = layer + 1 if by_layer else 2 * layer + sublayer + 1
    count = model.num_layers if by_layer else 2 * model.num_layers
    decay = {"harmonic": 1 / k, "sqrt": 1 / math.sqrt(k), "linear": (count - k + 1) / count, "none": 1.0}
    clamp = math.inf if model.residual.clamp == "none" else model.residual.clamp
    return model.residual.alpha * decay[model.residual.decay], clamp


def geodesic(x: Tensor, u: Tensor, alpha: float, clamp: float) -> Tensor:
    r = x.norm(dim=-1, keepdim=True)
    v = alpha * (u - (x * u).sum(-1, keepdim=True) * x / r**2)
    length = v.norm(dim=-1, keepdim=True)
    theta = (length / r).clamp_max(clamp)
    return x * theta.cos() + r * theta.sin() * v / length


def norm(weights: Weights, name: str, x: Tensor, model: ModelSettings) -> Tensor:
    if model.normalization == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + model.norm_epsilon).sqrt()
    return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", torch.zeros(()))


def attention(layer: Weights, x: Tensor, model: ModelSettings) -> Tensor:
    batch, sequence, _ = x.shape
    head = model.hidden_size // model.num_attention_heads
    groups = model.num_query_groups or model.num_attention_heads
    per_group = model.num_attention_heads // groups
    # Each group holds its query heads, then one key and one value head.
    qkv = linear(layer, "self_attention.linear_qkv", x).view(batch, sequence, groups, per_group + 2, head)
    q, k, v = qkv[:, :, :, :per_group], qkv[:, :, :, per_group : per_group + 1], qkv[:, :, :, per_group + 1]
    if model.qk_norm:
        q, k = norm(layer, "self_attention.q_layernorm", q, model), norm(layer, "self_attention.k_layernorm", k, model)
    if model.positions == "rope":
        q, k = rotate(q, model.rope_base), rotate(k, model.rope_base)
    scores = torch.einsum("bighd,bjgd->bghij", q, k.squeeze(3)) / math.sqrt(head)
    future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
    shares = scores.masked_fill(future, -math.inf).softmax(-1)
    mixed = torch.einsum("bghij,bjgd->bighd", shares, v).reshape(batch, sequence, -1)
    return linear(layer, "self_attention.linear_proj", mixed)


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary positions on [batch, sequence, ..., head]: the halves of a head are the two coordinates of its planes."""
    half = x.shape[-1] // 2
    # fp32 as Megatron-core's table is, so that the rest can be compared to the last digits.
    frequency = 1 / base ** (torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float32)[:, None, None, None] * frequency
    cosine, sine = angle.cos().double(), angle.sin().double()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


def mlp(layer: Weights, x: Tensor, model: ModelSettings) -> Tensor:
    hidden = linear(layer, "mlp.linear_fc1", x)
    if model.activation == "swiglu":
        gate, value = hidden.chunk(2, dim=-1)
        hidden = gate * gate.sigmoid() * value
    else:
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    return linear(layer, "mlp.linear_fc2", hidden)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Of every token [batch, sequence]."""
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def objective(logits: Tensor, labels: Tensor, model: ModelSettings) -> Tensor:
    """What training minimises, of every token [batch, sequence]."""
    return cross_entropy(logits, labels) + model.z_loss * logits.logsumexp(-1).square()
