"""``python -m pretrain import MODEL --from hf --to DIR``: a Llama or GPT-2 of transformers as weights to start from.

The tensors are read from safetensors one at a time and written as ours; then our model must give the logits of
transformers' on random tokens. No code of the model's folder is run, and nothing is unpickled.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron_ext import ModelSettings, ParallelSettings, ResidualSettings, build_model
from megatron_ext.initialize import global_names
from pretrain import parallel
from pretrain.checkpoint.initial import write_initial
from pretrain.checkpoint.weights import StoredWeights, fill
from pretrain.errors import UserError
from pretrain.export.extra import require_transformers
from pretrain.export.folder import new_folder
from pretrain.export.logits import our_logits, random_rows, require_equal, their_logits
from pretrain.export.names import GPT2_NAMES, Names, heads_of, llama_names
from pretrain.launch import read_launch

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def run_import(model_folder: Path, out: Path) -> None:
    """Write ``out``, check it, and say how to train from it; as a process of its own.

    Raises:
        UserError: for whatever the user can mend.
    """
    require_transformers("import --from hf")
    place = parallel.start(read_launch({}), ParallelSettings(), seed=0)
    try:
        print("\n".join(import_model(model_folder, out, place.device)), flush=True)
    finally:
        parallel.stop()


def import_model(model_folder: Path, out: Path, device: torch.device) -> list[str]:
    """Write ``out`` and check it; the process groups of one process run. Returns what there is to say.

    Raises:
        UserError: for whatever the user can mend; then ``out`` is not there.
    """
    import transformers

    config = _read_configuration(model_folder)
    shape = _SHAPES[config.model_type]
    settings = shape.settings_of(config)
    _require_sizes(model_folder, settings)
    weights = TheirWeights(model_folder, shape.names, settings, shape.prefix)
    with new_folder(out, "--to") as folder:
        origin = f"{config.model_type} in {model_folder.resolve()}"
        write_initial(weights, settings, config.vocab_size, origin, folder)
        weights.require_all_used()
        _write_configuration(settings, out, folder)
        rows = random_rows(config.vocab_size, settings.sequence_length)
        ours = _our_logits(settings, folder, rows, device)
        try:
            theirs = their_logits(getattr(transformers, shape.architecture), model_folder, rows, device)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"transformers cannot compute {model_folder}: {' '.join(str(error).split())}") from None
        difference, largest = require_equal(ours, theirs, f"our model of {model_folder}", "transformers")
    return [
        f"{out}: {config.model_type}, {settings.num_layers} layers x {settings.hidden_size} hidden, vocabulary "
        f"{config.vocab_size}",
        f"logits differ by {difference:.1e} at most from those of transformers, which reach {largest:.1f}",
        f"train from it, on data of its tokenizer, with the settings of {out / 'config.yaml'}",
    ]


def _our_logits(settings: ModelSettings, folder: Path, rows: Tensor, device: torch.device) -> Tensor:
    assert settings.vocab_size is not None
    # Forgotten on return: two models need not be in memory at once.
    module = _build(settings, device)
    fill(module, StoredWeights(folder))
    return our_logits(module, rows, settings.vocab_size)


class TheirWeights:
    """The tensors of a model folder under our global names, read one at a time.

    Attributes:
        shapes: by our global names.
    """

    def __init__(self, folder: Path, names: Names, model: ModelSettings, prefix: str) -> None:
        """Look at the files' headers.

        Args:
            folder: of the model.
            names: its names of the weights.
            model: its shape.
            prefix: of names that may be left out: files saved from the bare model lack it.

        Raises:
            UserError: there are no safetensors files, or they lack a weight.
        """
        self._files = _files_by_tensor(folder)
        self._folder, self._names, self._prefix, self._heads = folder, names, prefix, heads_of(model)
        self._used: set[str] = set()
        self.shapes = _our_shapes(model)
        for name in self.shapes:
            for theirs in names.of(name)[0]:
                if self._stored_name(theirs) is None and not theirs.endswith(".bias"):
                    raise UserError(f"{folder} has no weight {theirs}, which config.json promises")

    def read(self, name: str) -> Tensor:
        """One of our tensors, fp32; a bias that they do not have is zero."""
        theirs, cut = self._names.of(name)
        expected = cut.split(torch.empty(tuple(self.shapes[name]), device="meta"), self._heads)
        parts = [self._part(part, tuple(shape.shape)) for part, shape in zip(theirs, expected, strict=True)]
        return cut.join(parts, self._heads).contiguous()

    def require_all_used(self) -> None:
        """UserError if a tensor of the files was not asked for: the model is more than we made of it."""
        ignored = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "lm_head.weight")
        left = [name for name in self._files if name not in self._used and not name.endswith(ignored)]
        if left:
            raise UserError(f"{self._folder} has weights that our model has no place for: {sorted(left)[:3]}")

    def _stored_name(self, name: str) -> str | None:
        bare = name.removeprefix(self._prefix)
        return next((known for known in (name, bare) if known in self._files), None)

    def _part(self, name: str, shape: tuple[int, ...]) -> Tensor:
        from safetensors import safe_open

        stored = self._stored_name(name)
        if stored is None:
            return torch.zeros(shape)
        self._used.add(stored)
        with safe_open(self._files[stored], framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored)
        if tuple(tensor.shape) != shape:
            raise UserError(f"{self._folder}: {stored} is {tuple(tensor.shape)}, but config.json means {shape}")
        return tensor.to(torch.float32)


def _our_shapes(model: ModelSettings) -> dict[str, Sequence[int]]:
    module = _build(model, torch.device("meta"))
    vocabulary = ("embedding.word_embeddings.weight", "output_layer.weight")
    shapes = {name: tuple(parameter.shape) for name, parameter in global_names(module).items()}
    assert model.vocab_size is not None
    return {name: (model.vocab_size, *shape[1:]) if name in vocabulary else shape for name, shape in shapes.items()}


def _build(model: ModelSettings, device: torch.device) -> Any:
    return build_model(model, ParallelSettings(), dtype=torch.float32, device=device, seed=0, token_counts=None)


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder} has no *.safetensors, and other formats may run code when read; convert it by transformers' "
            f"save_pretrained, where you trust it"
        )
    found: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), file)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is no safetensors file: {error}") from None
    return found


def _read_configuration(folder: Path) -> Any:
    """config.json as transformers understands it, with no code of the folder's."""
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{folder} is no model of transformers: config.json: {error}") from None
    if kind not in _SHAPES:
        raise UserError(f"{folder} has model_type {kind}; only {' and '.join(_SHAPES)} can be imported")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever a strange config.json leads to
        raise UserError(f"{folder / 'config.json'}: {' '.join(str(error).split())}") from None


def _from_llama(config: Any) -> ModelSettings:
    rope = config.rope_parameters or {}
    _require(config, "hidden_act", ("silu",))
    _require(config, "head_dim", (config.hidden_size // config.num_attention_heads, None))
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"the model's rope_type is {rope['rope_type']}; only the default, unscaled one can be imported")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("the model turns a part of each head only (partial_rotary_factor), which cannot be imported")
    return _settings(
        config,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        ffn_hidden_size=config.intermediate_size,
        sequence_length=config.max_position_embeddings,
        activation="swiglu",
        normalization="rmsnorm",
        norm_epsilon=config.rms_norm_eps,
        positions="rope",
        rope_base=float(rope.get("rope_theta", 10000.0)),
        linear_bias=bool(config.attention_bias or config.mlp_bias),
    )


def _from_gpt2(config: Any) -> ModelSettings:
    _require(config, "activation_function", tuple(_ACTIVATIONS))
    _require(config, "scale_attn_weights", (True,))
    _require(config, "scale_attn_by_inverse_layer_idx", (False,))
    return _settings(
        config,
        num_layers=config.n_layer,
        hidden_size=config.n_embd,
        num_attention_heads=config.n_head,
        ffn_hidden_size=config.n_inner or 4 * config.n_embd,
        sequence_length=config.n_positions,
        activation=_ACTIVATIONS[config.activation_function],
        normalization="layernorm",
        norm_epsilon=config.layer_norm_epsilon,
        positions="learned",
        linear_bias=True,
    )


def _settings(config: Any, **shape: Any) -> ModelSettings:
    return ModelSettings(
        **shape,
        vocab_size=config.vocab_size,
        tie_embeddings=bool(config.tie_word_embeddings),
        output_bias="none",
        residual=ResidualSettings(scheme="pre_norm"),
    )


def _require_sizes(folder: Path, model: ModelSettings) -> None:
    """UserError where config.json tells of a model that there cannot be."""
    heads, groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
    sizes = (model.vocab_size, model.num_layers, model.hidden_size, heads, groups, model.ffn_hidden_size)
    possible = all(type(size) is int and size > 0 for size in (*sizes, model.sequence_length))
    if not possible or model.hidden_size % heads or heads % groups:
        raise UserError(
            f"{folder / 'config.json'} describes no model: vocabulary {model.vocab_size}, {model.num_layers} layers x "
            f"{model.hidden_size} hidden, {heads} heads in {groups} groups, MLP of {model.ffn_hidden_size}, sequence "
            f"{model.sequence_length}"
        )


def _require(config: Any, name: str, wanted: tuple[Any, ...]) -> None:
    value = getattr(config, name, None)
    if value not in wanted:
        raise UserError(
            f"the model's {name} is {value}; only {' or '.join(str(known) for known in wanted if known is not None)} "
            f"can be imported"
        )


@dataclass(frozen=True)
class _Shape:
    """Models of one ``model_type``; ``prefix`` may be left out in their names of weights."""

    settings_of: Callable[[Any], ModelSettings]
    names: Names
    prefix: str
    architecture: str


_SHAPES = {
    "llama": _Shape(_from_llama, llama_names(gated=True), "model.", "LlamaForCausalLM"),
    "gpt2": _Shape(_from_gpt2, GPT2_NAMES, "transformer.", "GPT2LMHeadModel"),
}


def _write_configuration(settings: ModelSettings, out: Path, folder: Path) -> None:
    """The part of a run's configuration that the weights decide."""
    default = {field.name: field.default for field in dataclasses.fields(ModelSettings)}
    said = {name: value for name, value in dataclasses.asdict(settings).items() if value != default[name]}
    said["residual"] = {"scheme": settings.residual.scheme}
    text = yaml.safe_dump({"model": said, "train": {"init_from": str(out.resolve())}}, sort_keys=False)
    head = "# What these weights decide of a run; run, data, train and optimizer are yours.\n"
    (folder / "config.yaml").write_text(head + text, encoding="utf-8")
