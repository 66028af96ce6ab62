"""A whole GPT in plain PyTorch, written from the formulas, for Megatron-core's layout of the weights."""

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import ModelSettings
from megatron_ext.schemes import with_defaults
from tests.megatron_ext.reference_schemes import STEPS, Place, Weights, enter, leave, norm


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which document each token [batch, sequence] of a sample belongs to, and where in it; no documents are one."""

    document: Tensor
    position: Tensor

    @classmethod
    def of(cls, tokens: Tensor, eod_id: int | None) -> "Layout":
        """Written out token by token; an end of document is its document's last."""
        document, position = torch.zeros_like(tokens), torch.zeros_like(tokens)
        for row in range(tokens.shape[0]):
            for i in range(1, tokens.shape[1]):
                ends = int(tokens[row, i - 1]) == eod_id
                document[row, i] = document[row, i - 1] + ends
                position[row, i] = 0 if ends else position[row, i - 1] + 1
        return cls(document, position)

    def hidden(self) -> Tensor:
        """Dense [batch, query, key]: keys of other documents, and of the future."""
        sequence = self.document.shape[1]
        future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
        return future | (self.document[:, :, None] != self.document[:, None, :])


def gpt(weights: Weights, tokens: Tensor, model: ModelSettings, eod_id: int | None = None) -> Tensor:
    """Logits [batch, sequence, vocabulary without padding] of tokens [batch, sequence].

    With `eod_id` every document behind which it stands is a sequence of its own.
    """
    layout = Layout.of(tokens, eod_id)
    model = dataclasses.replace(model, residual=with_defaults(model.residual))
    embedding = weights["embedding.word_embeddings.weight"]
    x = embedding[tokens]
    if model.positions == "learned":
        x = x + weights["embedding.position_embeddings.weight"][layout.position]
    x = enter(x, weights, model)
    for index in range(model.num_layers):
        prefix = f"decoder.layers.{index}."
        layer = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        sublayers = (functools.partial(attention, layer, model, layout), functools.partial(mlp, layer, model))
        for number, sublayer in enumerate(sublayers):
            x = STEPS[model.residual.scheme](x, sublayer, Place(layer, model, index, number))
    x = leave(x, weights, model)
    logits = linear(weights | {"output_layer.weight": weights.get("output_layer.weight", embedding)}, "output_layer", x)
    return logits[..., : model.vocab_size]


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))


def attention(layer: Weights, model: ModelSettings, layout: Layout, x: Tensor) -> Tensor:
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
        q, k = rotate(q, layout.position, model.rope_base), rotate(k, layout.position, model.rope_base)
    scores = torch.einsum("bighd,bjgd->bghij", q, k.squeeze(3)) / math.sqrt(head)
    shares = scores.masked_fill(layout.hidden()[:, None, None], -math.inf).softmax(-1)
    mixed = torch.einsum("bghij,bjgd->bighd", shares, v).reshape(batch, sequence, -1)
    return linear(layer, "self_attention.linear_proj", mixed)


def rotate(x: Tensor, position: Tensor, base: float) -> Tensor:
    """Turn x [batch, sequence, ., ., head]: the halves of a head are the two coordinates of its planes."""
    half = x.shape[-1] // 2
    # fp32 as Megatron-core's table is, so that the rest can be compared to the last digits.
    frequency = 1 / base ** (torch.arange(half, dtype=torch.float32) / half)
    angle = position.to(torch.float32)[..., None, None, None] * frequency
    cosine, sine = angle.cos().double(), angle.sin().double()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


def mlp(layer: Weights, model: ModelSettings, x: Tensor) -> Tensor:
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
