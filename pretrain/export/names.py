"""Our weights under Hugging Face's names: how each tensor is called there, and how it is cut or joined."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext import ModelSettings
from megatron_ext.initialize import EMBEDDING

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


@dataclass(frozen=True)
class Heads:
    """How a fused query/key/value projection is made: each group holds its queries, then one key and one value head."""

    groups: int
    queries: int
    head_dim: int


def heads_of(model: ModelSettings) -> Heads:
    """The heads of a model."""
    groups = model.num_query_groups or model.num_attention_heads
    return Heads(groups, model.num_attention_heads // groups, model.hidden_size // model.num_attention_heads)


@dataclass(frozen=True)
class Cut:
    """One of our tensors as one or several of theirs; ``join`` undoes ``split``, both also on the meta device."""

    split: Callable[[Tensor, Heads], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor], Heads], Tensor]


def _split_heads(fused: Tensor, heads: Heads) -> list[Tensor]:
    """[groups * (queries + 2) * head_dim, ...] -> queries, keys, values, each [heads * head_dim, ...]."""
    by_group = fused.view(heads.groups, heads.queries + 2, heads.head_dim, *fused.shape[1:])
    return [part.flatten(0, 2) for part in torch.split(by_group, [heads.queries, 1, 1], dim=1)]


def _join_heads(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    counts = (heads.queries, 1, 1)
    shaped = [
        part.reshape(heads.groups, count, heads.head_dim, *part.shape[1:])
        for part, count in zip(parts, counts, strict=True)
    ]
    return torch.cat(shaped, dim=1).flatten(0, 2)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t() if tensor.dim() == 2 else tensor


_SAME = Cut(lambda tensor, heads: [tensor], lambda parts, heads: parts[0])
_QKV = Cut(_split_heads, _join_heads)
_GATE_AND_UP = Cut(lambda tensor, heads: tensor.chunk(2), lambda parts, heads: torch.cat(list(parts)))
# GPT-2 keeps its matrices as [input, output], queries, keys and values side by side.
_TRANSPOSED = Cut(lambda tensor, heads: [_transposed(tensor)], lambda parts, heads: _transposed(parts[0]))
_TRANSPOSED_QKV = Cut(
    lambda tensor, heads: [_transposed(torch.cat(_split_heads(tensor, heads)))],
    lambda parts, heads: _join_heads(_transposed(parts[0]).chunk(3), heads),
)

Modules = Mapping[str, tuple[tuple[str, ...], Cut]]
"""Module of ours -> their modules that hold its parameters."""


@dataclass(frozen=True)
class Names:
    """The names of one shape of model.

    Attributes:
        outside: modules outside the layers.
        layer: their name of a layer's modules begins with it, and the layer's number.
        inside: modules of a layer.
    """

    outside: Modules
    layer: str
    inside: Modules

    def of(self, ours: str) -> tuple[tuple[str, ...], Cut]:
        """Their names of the parameter with our global name, and how it is cut; KeyError if they have none."""
        match = _LAYER.fullmatch(ours)
        modules, rest, prefix = self.outside, ours, ""
        if match and not match[2].startswith("entry."):
            modules, rest, prefix = self.inside, match[2], f"{self.layer}.{match[1]}."
        elif match:
            rest = match[2]
        for module, (theirs, cut) in modules.items():
            if rest.startswith(f"{module}."):
                return tuple(prefix + name + rest.removeprefix(module) for name in theirs), cut
        raise KeyError(ours)


def _one(theirs: str, cut: Cut = _SAME) -> tuple[tuple[str, ...], Cut]:
    return (theirs,), cut


def llama_names(gated: bool) -> Names:
    """Llama's names; what Llama lacks has the names of our own modelling file."""
    first = (("mlp.gate_proj", "mlp.up_proj"), _GATE_AND_UP) if gated else _one("mlp.up_proj")
    return Names(
        outside={
            "embedding.word_embeddings": _one("model.embed_tokens"),
            "embedding.position_embeddings": _one("model.embed_positions"),
            "entry": _one("model.entry"),
            "decoder.final_layernorm": _one("model.norm"),
            "output_layer": _one("lm_head"),
        },
        layer="model.layers",
        inside={
            "input_layernorm": _one("input_layernorm"),
            "self_attention.linear_qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), _QKV),
            "self_attention.linear_proj": _one("self_attn.o_proj"),
            "self_attention.q_layernorm": _one("self_attn.q_norm"),
            "self_attention.k_layernorm": _one("self_attn.k_norm"),
            "self_attn_bda": _one("attention_residual"),
            "pre_mlp_layernorm": _one("post_attention_layernorm"),
            "mlp.linear_fc1": first,
            "mlp.linear_fc2": _one("mlp.down_proj"),
            "mlp_bda": _one("mlp_residual"),
        },
    )


GPT2_NAMES = Names(
    outside={
        "embedding.word_embeddings": _one("transformer.wte"),
        "embedding.position_embeddings": _one("transformer.wpe"),
        "decoder.final_layernorm": _one("transformer.ln_f"),
        "output_layer": _one("lm_head"),
    },
    layer="transformer.h",
    inside={
        "input_layernorm": _one("ln_1"),
        "self_attention.linear_qkv": _one("attn.c_attn", _TRANSPOSED_QKV),
        "self_attention.linear_proj": _one("attn.c_proj", _TRANSPOSED),
        "pre_mlp_layernorm": _one("ln_2"),
        "mlp.linear_fc1": _one("mlp.c_fc", _TRANSPOSED),
        "mlp.linear_fc2": _one("mlp.c_proj", _TRANSPOSED),
    },
)


def their_shapes(names: Names, shapes: Mapping[str, Sequence[int]], heads: Heads) -> dict[str, tuple[int, ...]]:
    """Their name -> shape of all their tensors, from our global names and shapes; in the order of ours."""
    found: dict[str, tuple[int, ...]] = {}
    for ours, shape in shapes.items():
        theirs, cut = names.of(ours)
        parts = cut.split(torch.empty(tuple(shape), device="meta"), heads)
        found |= {name: tuple(part.shape) for name, part in zip(theirs, parts, strict=True)}
    return found


def reading_order(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Our global names as a reader would list them: the embedding, layer by layer, the rest."""

    def place(name: str) -> tuple[int, int, str]:
        match = _LAYER.fullmatch(name)
        if match:
            return 1, int(match[1]), name
        return (0 if name.startswith(EMBEDDING.split(".")[0]) else 2), 0, name

    return sorted(shapes, key=place)
