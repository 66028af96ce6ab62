"""The peer's model: a pre-norm GPT in plain PyTorch, as a careful user would write it for speed.

It computes what megatron_ext's `pre_norm` computes (RoPE, SwiGLU, RMSNorm, causal attention, output bias, padded
vocabulary), on one process and without anything for parallelism.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext.settings import ModelSettings


class PlainGPT(nn.Module):
    """A pre-norm decoder; its weights are uninitialised until they are loaded.

    Args:
        settings: shape; `vocab_size` must be set.
        rows: of the embedding and the output layer, at least the vocabulary; the rest is padding.
        dtype: of all parameters and of the residual stream.

    Raises:
        ValueError: settings for another kind of model.
    """

    def __init__(self, settings: ModelSettings, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        kind = (settings.activation, settings.normalization, settings.tie_embeddings, settings.output_bias != "none")
        if settings.vocab_size is None or kind != ("swiglu", "rmsnorm", False, True):
            raise ValueError("the plain GPT has a vocabulary, SwiGLU, RMSNorm, untied embeddings and an output bias")
        self.vocab_size = settings.vocab_size
        hidden = settings.hidden_size
        with torch.device(device):
            self.embedding = nn.Embedding(rows, hidden, dtype=dtype)
            self.layers = nn.ModuleList(_Layer(settings, dtype) for _ in range(settings.num_layers))
            self.norm = nn.RMSNorm(hidden, eps=settings.norm_epsilon, dtype=dtype)
            self.output = nn.Linear(hidden, rows, dtype=dtype)
        cosine, sine = rotation(settings.sequence_length, hidden // settings.num_attention_heads, settings.rope_base)
        self.cosine: Tensor
        self.sine: Tensor
        self.register_buffer("cosine", cosine.to(device, dtype), persistent=False)
        self.register_buffer("sine", sine.to(device, dtype), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Loss of every token in nats, fp32 [batch, sequence]; tokens and labels are [batch, sequence]."""
        state = self.embedding(tokens)
        for layer in self.layers:
            state = layer(state, self.cosine, self.sine)
        # Logits of padding rows are cut off before the loss sees them.
        logits = self.output(self.norm(state))[..., : self.vocab_size].flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)


class _Layer(nn.Module):
    def __init__(self, settings: ModelSettings, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, ffn, eps = settings.hidden_size, settings.ffn_hidden_size, settings.norm_epsilon
        self.heads = settings.num_attention_heads
        self.groups = settings.num_query_groups or self.heads
        self.head_size = hidden // self.heads
        self.attention_norm = nn.RMSNorm(hidden, eps=eps, dtype=dtype)
        qkv = (self.heads + 2 * self.groups) * self.head_size
        self.qkv = nn.Linear(hidden, qkv, bias=False, dtype=dtype)
        self.projection = nn.Linear(hidden, hidden, bias=False, dtype=dtype)
        self.mlp_norm = nn.RMSNorm(hidden, eps=eps, dtype=dtype)
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False, dtype=dtype)
        self.down = nn.Linear(ffn, hidden, bias=False, dtype=dtype)

    def forward(self, state: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        state = state + self.projection(self._attend(self.qkv(self.attention_norm(state)), cosine, sine))
        gate, up = self.gate_up(self.mlp_norm(state)).chunk(2, dim=-1)
        output: Tensor = state + self.down(F.silu(gate) * up)
        return output

    def _attend(self, qkv: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Causal attention of the fused projection [batch, sequence, (heads + 2 groups) head_size]."""
        batch, sequence, _ = qkv.shape
        heads = qkv.view(batch, sequence, -1, self.head_size)
        # Queries and keys stand side by side and turn together.
        turning, values = torch.split(heads, [self.heads + self.groups, self.groups], dim=2)
        queries, keys = torch.split(rotate(turning, cosine, sine), [self.heads, self.groups], dim=2)
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.heads != self.groups,
        )
        return attended.transpose(1, 2).reshape(batch, sequence, -1)


def rotation(sequence_length: int, head_size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE (arXiv 2104.09864), fp32 [sequence, 1, head_size]; channel i turns with i + half.

    The sines of the first half are negated, so that `rotate` needs one multiplication for both halves.
    """
    frequencies = base ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(sequence_length, dtype=torch.float32), frequencies)[:, None]
    return torch.cat([angles.cos(), angles.cos()], dim=-1), torch.cat([-angles.sin(), angles.sin()], dim=-1)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn [batch, sequence, heads, head_size] by each position's angles."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([second, first], dim=-1) * sine


def from_megatron(tensors: Mapping[str, Tensor], settings: ModelSettings) -> dict[str, Tensor]:
    """Weights, or gradients, of megatron_ext's `pre_norm` by the names and in the layout of `PlainGPT`.

    Args:
        tensors: undivided, by the names of :func:`megatron_ext.initialize.global_names`.
    """
    named = {
        "embedding.weight": tensors["embedding.word_embeddings.weight"],
        "norm.weight": tensors["decoder.final_layernorm.weight"],
        "output.weight": tensors["output_layer.weight"],
        "output.bias": tensors["output_layer.bias"],
    }
    for layer in range(settings.num_layers):
        old, new = f"decoder.layers.{layer}", f"layers.{layer}"
        named |= {
            f"{new}.attention_norm.weight": tensors[f"{old}.input_layernorm.weight"],
            f"{new}.qkv.weight": _ungrouped(tensors[f"{old}.self_attention.linear_qkv.weight"], settings),
            f"{new}.projection.weight": tensors[f"{old}.self_attention.linear_proj.weight"],
            f"{new}.mlp_norm.weight": tensors[f"{old}.pre_mlp_layernorm.weight"],
            f"{new}.gate_up.weight": tensors[f"{old}.mlp.linear_fc1.weight"],
            f"{new}.down.weight": tensors[f"{old}.mlp.linear_fc2.weight"],
        }
    return named


def _ungrouped(qkv: Tensor, settings: ModelSettings) -> Tensor:
    """Megatron-core keeps each group's queries, key and value together; here come all queries, all keys, all values."""
    heads = settings.num_attention_heads
    groups = settings.num_query_groups or heads
    grouped = qkv.view(groups, heads // groups + 2, settings.hidden_size // heads, -1)
    return torch.cat([part.flatten(0, 2) for part in (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])])
