"""A Llama and a GPT-2 of transformers become weights to start from, and what cannot is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pretrain.checkpoint.initial import check_initial, find_initial
from pretrain.checkpoint.weights import StoredWeights
from pretrain.config import Config
from pretrain.errors import UserError
from pretrain.export.extra import require_transformers
from pretrain.export.from_hf import import_model
from tests.pretrain import tiny

pytestmark = pytest.mark.usefixtures("single_process")

VOCAB = 150
CPU = torch.device("cpu")


def llama(**changes: Any) -> LlamaForCausalLM:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 24,
        "initializer_range": 0.3,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
    }
    return randomised(LlamaForCausalLM(LlamaConfig(**shape | changes)))


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    shape = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "initializer_range": 0.3}
    return randomised(GPT2LMHeadModel(GPT2Config(**shape | changes)))


def randomised(model: Any) -> Any:
    """Gains and biases off their trivial start."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: llama(), {"rope_base": 777.0, "num_query_groups": 2}),
        (lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True), {"tie_embeddings": True}),
        (lambda: llama(attention_bias=True), {"linear_bias": True}),
        (lambda: gpt2(), {"activation": "gelu_tanh", "tie_embeddings": True, "ffn_hidden_size": 128}),
        (lambda: gpt2(activation_function="gelu", n_inner=40), {"activation": "gelu", "ffn_hidden_size": 40}),
    ],
    ids=["llama", "llama, biases, tied", "llama, attention's biases", "gpt2", "gpt2, exact gelu"],
)
def test_computes_the_same(model: Any, said: dict[str, Any], tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    lines = import_model(tmp_path / "theirs", tmp_path / "ours", CPU)
    assert "logits differ by" in lines[1]  # an import that computes something else is refused
    written = yaml.safe_load((tmp_path / "ours" / "config.yaml").read_text())
    assert said.items() <= written["model"].items()
    assert written["train"] == {"init_from": str(tmp_path / "ours")}
    # The written settings are the weights' own, and those of no other model.
    shape = {"num_query_groups": None, **written["model"]}
    check_initial(tiny.config("one", model=shape, train=written["train"]), VOCAB, find_initial(tmp_path / "ours"))


def test_names_without_their_first_part_and_buffers_are_known(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 24, 24)}, file, metadata={"format": "pt"})
    import_model(tmp_path / "theirs", tmp_path / "ours", CPU)


def broken(folder: Path, **changes: Any) -> None:
    """Change what a model's config.json says."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "opt"}, r"has model_type opt; only llama and gpt2 can be imported"),
        ({"hidden_act": "gelu"}, r"hidden_act is gelu; only silu can be imported"),
        ({"head_dim": 4}, r"head_dim is 4; only 8 can be imported"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 777.0, "factor": 2.0}},
            r"rope_type is linear; only the default",
        ),
        ({"num_hidden_layers": 3}, r"has no weight model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"has weights that our model has no place for: \['model\.layers\.1\."),
        ({"intermediate_size": 40}, r"mlp.gate_proj.weight is \(48, 32\), but config.json means \(40, 32\)"),
        ({"hidden_size": "wide"}, r"config\.json: "),
        ({"num_key_value_heads": 3}, "describes no model: .* 4 heads in 3 groups"),
        ({"max_position_embeddings": 0}, "describes no model: .* sequence 0"),
        ({"intermediate_size": -1}, "describes no model: .* MLP of -1"),
        ({"vocab_size": -1}, "describes no model: vocabulary -1"),
    ],
    ids=str,
)
def test_what_cannot_be_imported(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "theirs")
    broken(tmp_path / "theirs", **change)
    with pytest.raises(UserError, match=complaint):
        import_model(tmp_path / "theirs", tmp_path / "ours", CPU)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"n_head": 0}, "describes no model: .* 0 heads"), ({"attn_pdrop": 3}, "transformers cannot compute .*theirs: ")],
)
def test_a_gpt2_that_there_cannot_be(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "theirs")
    broken(tmp_path / "theirs", **change)
    with pytest.raises(UserError, match=complaint):
        import_model(tmp_path / "theirs", tmp_path / "ours", CPU)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_files_that_may_run_code_are_not_read(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"has no \*\.safetensors"):
        import_model(tmp_path, tmp_path / "ours", CPU)


def test_a_model_that_computes_otherwise_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path / "theirs")
    plain = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def other(cls: Any, *arguments: Any, **named: Any) -> Any:
        model, report = plain(cls, *arguments, **named)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight[0, 0] += 0.1
        return model, report

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", classmethod(other))
    with pytest.raises(UserError, match=r"does not compute what transformers does: logits differ by"):
        import_model(tmp_path / "theirs", tmp_path / "ours", CPU)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"export --to hf needs transformers and safetensors; .* -e '\.\[hf\]'"):
        require_transformers("export --to hf")


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    llama().save_pretrained(folder / "theirs")
    import_model(folder / "theirs", folder / "ours", CPU)
    return folder / "ours"


def config(folder: Path, **changes: Any) -> Config:
    shape = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    return tiny.config("one", model=shape | changes, train={"init_from": str(folder)})


@pytest.mark.parametrize("free", [{}, {"dropout": 0.1, "z_loss": 1e-4, "recompute": "full", "sequence_length": 12}])
def test_what_decides_nothing_may_differ(imported: Path, free: dict[str, Any]) -> None:
    check_initial(config(imported, **free), VOCAB, find_initial(imported))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_layers": 4}, r"model\.num_layers=4, but the weights of train\.init_from=.* a model with 2; set it to"),
        ({"rope_base": 1e4}, r"model\.rope_base=10000\.0, .* with 777\.0"),
        ({"output_bias": "unigram"}, r"model\.output_bias=learned, .* with none"),
        ({"residual": {"scheme": "geonorm"}}, r"model\.residual\.scheme=geonorm, .* with pre_norm"),
    ],
    ids=str,
)
def test_another_model_is_refused(imported: Path, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        check_initial(config(imported, **change), VOCAB, find_initial(imported))


def test_another_vocabulary_is_refused(imported: Path) -> None:
    with pytest.raises(UserError, match=r"the vocabulary is 200, .* with 150; set model\.vocab_size"):
        check_initial(config(imported), 200, find_initial(imported))


def test_what_is_no_folder_of_weights(imported: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.init_from=.*nowhere: .* is no folder"):
        find_initial(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"train\.init_from=.*too long: .* is no folder"):
        find_initial(tmp_path / ("too long" * 99))
    with pytest.raises(UserError, match=r"train\.init_from=~no\.such\.user/x: there is no such user"):
        find_initial(Path("~no.such.user/x"))
    for name in ("weights.json", ".metadata"):
        (tmp_path / name).write_bytes((imported / name).read_bytes())
    with pytest.raises(UserError, match=r"is damaged .*import it anew"):
        find_initial(tmp_path)
    record = json.loads((imported / "weights.json").read_text())
    (tmp_path / "weights.json").write_text(json.dumps(record | {"format": 9}))
    with pytest.raises(UserError, match=r"has format 9, but this version reads 1"):
        find_initial(tmp_path)
    (tmp_path / "weights.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"is damaged .*recursion.*import it anew"):
        find_initial(tmp_path)


def test_the_weights_are_whole_fp32_tensors(imported: Path) -> None:
    stored = StoredWeights(imported)
    theirs = load_file(imported.parent / "theirs" / "model.safetensors")
    assert torch.equal(stored.read("embedding.word_embeddings.weight"), theirs["model.embed_tokens.weight"])
    assert sum(shape.numel() for shape in stored.shapes.values()) == sum(t.numel() for t in theirs.values())
