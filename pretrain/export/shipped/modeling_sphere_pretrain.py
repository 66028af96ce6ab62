"""A decoder-only transformer with one of twelve residual schemes, for inference by transformers.

Nothing here depends on buffers: transformers leaves those that are not saved uninitialised.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_sphere_pretrain import SpherePretrainConfig
from .residual_sphere_pretrain import RESIDUALS, make_entry, make_norm

_NORMED_INPUTS = ("pre_norm", "sandwich_norm", "peri_ln", "keel")

# What older versions of transformers call the cache in a model's output.
_CACHE_FIELD = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


def rotary_angles(position_ids: Tensor, head_dim: int, base: float) -> Tensor:
    """fp32 [batch, 1, sequence, head_dim]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
    angles = position_ids[..., None].float() * (1.0 / base**exponents)
    return torch.cat([angles, angles], dim=-1)[:, None]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of x [batch, heads, sequence, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos().to(x.dtype) + torch.cat([-second, first], dim=-1) * angles.sin().to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, config: SpherePretrainConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        queries, keys = (heads * self.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.linear_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.linear_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.linear_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.linear_bias)
        kind = config.normalization if config.qk_norm else "none"
        self.q_norm, self.k_norm = (make_norm(kind, self.head_dim, config.norm_epsilon) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor | None, mask: Tensor | None, cache: Any) -> Tensor:
        """[batch, sequence, hidden]; `mask` is True where a query sees a key, None for plainly causal."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        q, k, v = (project(x).view(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (tensor.transpose(1, 2) for tensor in (self.q_norm(q), self.k_norm(k), v))
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        if mask is not None and mask.shape[-1] != k.shape[2]:  # a cache of fixed size holds more than was seen
            mask = F.pad(mask, (0, k.shape[2] - mask.shape[-1]))
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return projected


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class MLP(nn.Module):
    """Two linear layers, or three with a gate."""

    def __init__(self, config: SpherePretrainConfig) -> None:
        super().__init__()
        sizes, bias = (config.hidden_size, config.intermediate_size), config.linear_bias
        self.activation = _ACTIVATIONS[config.activation]
        self.gate_proj = nn.Linear(*sizes, bias=bias) if config.activation == "swiglu" else None
        self.up_proj = nn.Linear(*sizes, bias=bias)
        self.down_proj = nn.Linear(*sizes[::-1], bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and type."""
        inner = self.up_proj(x)
        inner = self.activation(inner) if self.gate_proj is None else self.activation(self.gate_proj(x)) * inner
        projected: Tensor = self.down_proj(inner)
        return projected


class Layer(nn.Module):
    """Attention and MLP, each joined to the stream as the scheme says."""

    def __init__(self, config: SpherePretrainConfig, layer: int) -> None:
        super().__init__()
        kind = config.normalization if config.scheme in _NORMED_INPUTS else "none"
        kind = "dyt" if config.scheme == "pre_dyt" else kind
        self.input_layernorm = make_norm(kind, config.hidden_size, config.norm_epsilon)
        self.self_attn = Attention(config, layer)
        self.attention_residual = RESIDUALS[config.scheme](config, 2 * layer + 1)
        self.post_attention_layernorm = make_norm(kind, config.hidden_size, config.norm_epsilon)
        self.mlp = MLP(config)
        self.mlp_residual = RESIDUALS[config.scheme](config, 2 * layer + 2)

    def forward(self, x: Tensor, angles: Tensor | None, mask: Tensor | None, cache: Any) -> Tensor:
        """The new state [batch, sequence, hidden]."""
        x = self.attention_residual(x, self.self_attn(self.input_layernorm(x), angles, mask, cache))
        new_state: Tensor = self.mlp_residual(x, self.mlp(self.post_attention_layernorm(x)))
        return new_state


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: SpherePretrainConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.entry = make_entry(config)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = make_norm(config.final_norm, config.hidden_size, config.norm_epsilon)


def visible(attention_mask: Tensor | None, past: int, length: int, device: torch.device) -> Tensor | None:
    """Which of the keys each query sees, bool [batch or 1, 1, length, past + length]; None for plainly causal.

    Args:
        attention_mask: [batch, past + length], 0 for padding; or made ready, [batch, 1, length, keys].
        past: tokens in the cache.
        length: of the query.
        device: of the result.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    if past == 0 and (attention_mask is None or bool(attention_mask.all())):
        return None
    here = torch.arange(past, past + length, device=device)[:, None]
    there = torch.arange(past + length, device=device)[None]
    mask = (there <= here)[None, None]
    if attention_mask is not None:
        # A token of padding sees itself, so that its row is not empty.
        mask = mask & attention_mask[:, None, None, : past + length].bool() | (there == here)
    return mask


class SpherePretrainForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The whole model."""

    config_class = SpherePretrainConfig
    base_model_prefix = "model"
    _no_split_modules = ["Layer"]  # noqa: RUF012 # as transformers wants it
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: SpherePretrainConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.output_bias)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The tokens' embedding."""
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the tokens' embedding."""
        self.model.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As transformers' own causal models; `cache` is also taken by its older name `past_key_values`."""
        if kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
            raise ValueError("attentions and hidden states are not returned by this model")
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache) and not self.training:
            cache = DynamicCache()
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        past = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
            if attention_mask is not None and attention_mask.dim() == 2:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -x.shape[1] :]
        angles = None
        if self.config.positions == "rope":
            angles = rotary_angles(position_ids, self.config.head_dim, self.config.rope_base)
        elif self.model.embed_positions is not None:
            x = x + self.model.embed_positions(position_ids)
        mask = visible(attention_mask, past, x.shape[1], x.device)
        x = self.model.entry(x)
        for layer in self.model.layers:
            x = layer(x, angles, mask, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(self.model.norm(x[:, kept]))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{_CACHE_FIELD: cache})
