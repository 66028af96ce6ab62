"""Names, files and tokenizers of an export, each against what reads it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.export.folder import new_folder
from pretrain.export.names import GPT2_NAMES, Heads, llama_names
from pretrain.export.safetensors_files import write_files
from pretrain.export.tokenizer import differing, sample_texts, write_tokenizer
from tests.launch import REPOSITORY
from tests.pretrain.export import shipped_code
from tools.tokenizer import EOD_PIECE, train

HEADS = Heads(groups=2, queries=3, head_dim=4)


@pytest.mark.parametrize(
    ("names", "ours", "shape"),
    [
        (llama_names(gated=True), "decoder.layers.3.self_attention.linear_qkv.weight", (40, 5)),
        (llama_names(gated=True), "decoder.layers.3.self_attention.linear_qkv.bias", (40,)),
        (llama_names(gated=True), "decoder.layers.3.mlp.linear_fc1.weight", (6, 5)),
        (GPT2_NAMES, "decoder.layers.3.mlp.linear_fc1.weight", (6, 5)),
        (GPT2_NAMES, "decoder.layers.3.mlp.linear_fc1.bias", (6,)),
    ],
    ids=str,
)
def test_what_is_cut_can_be_joined(names: Any, ours: str, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    theirs, cut = names.of(ours)
    parts = cut.split(tensor, HEADS)
    assert len(parts) == len(theirs)
    assert torch.equal(cut.join(parts, HEADS), tensor)


def test_a_name_that_they_do_not_have() -> None:
    with pytest.raises(KeyError):
        GPT2_NAMES.of("decoder.layers.0.self_attn_bda.alpha.raw")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_are_bounded_and_hold_every_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    shapes = {"a": (3, 5), "b": (7,), "c": (1,), "d": (40, 3), "e": (2, 2)}
    tensors = {name: torch.randn(shape).t().contiguous().t() for name, shape in shapes.items() if len(shape) == 2}
    tensors |= {name: torch.randn(shape) for name, shape in shapes.items() if len(shape) == 1}
    largest = 30 * dtype.itemsize
    write_files(tmp_path, shapes, ((name, tensors[name]) for name in shapes), dtype, largest)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 147 * dtype.itemsize
    found: dict[str, Tensor] = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        held = load_file(file)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= largest
        assert {index["weight_map"][name] for name in held} == {file.name}
        found |= held
    assert found.keys() == shapes.keys()
    assert all(torch.equal(found[name], tensors[name].to(dtype)) for name in shapes)


def test_a_tensor_that_was_not_announced_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="came where a"):
        write_files(tmp_path, {"a": (2,)}, [("b", torch.zeros(2))], torch.float32)


def fill(out: Path, argument: str = "--out", fails: bool = False) -> None:
    with new_folder(out, argument) as folder:
        (folder / "file").touch()
        if fails:
            raise RuntimeError


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with pytest.raises(RuntimeError):
        fill(out, fails=True)
    assert list(out.parent.iterdir()) == []
    fill(out)
    assert [path.name for path in out.parent.rglob("*")] == ["out", "file"]
    with pytest.raises(UserError, match=r"--out .*out exists already; remove it or name another folder"):
        fill(out)
    with pytest.raises(UserError, match=r"--to .*file/out cannot be written: File exists"):
        fill(out / "file" / "out", "--to")


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    text = file.with_name("text.txt")
    text.write_text((REPOSITORY / "README.md").read_text())
    train([text], 400, file, request.param, 10**6, 1, special=["<|user|>"])
    return request.param, Tokenizer(file)


def test_ids_are_those_of_sentencepiece(
    trained: tuple[str, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, tokenizer = trained
    shipped_code.kept_in(tmp_path / "modules", monkeypatch)
    folder = tmp_path / "out"
    folder.mkdir()
    kind = write_tokenizer(tokenizer.file, tokenizer.eod_id, folder)
    assert kind == ("stock" if model_type == "bpe" else "own")
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=kind == "own")
    words = (REPOSITORY / "README.md").read_text().split(" ")
    draw = random.Random(7)
    texts = [" ".join(draw.sample(words, 20)) for _ in range(50)] + sample_texts(tokenizer)
    assert differing(tokenizer, theirs, texts) == []
    assert (folder / "tokenizer.json").exists() == (kind == "stock")
    assert theirs.eos_token_id == tokenizer.eod_id
    assert tokenizer.eod_id not in theirs(f"a{EOD_PIECE} {EOD_PIECE}").input_ids
    assert theirs.decode([tokenizer.eod_id, *theirs("a\nb").input_ids], skip_special_tokens=True) == "a\nb"
    batch = theirs(["a b", "a"], padding=True)
    assert [sum(mask) for mask in batch.attention_mask] == [len(theirs(text).input_ids) for text in ("a b", "a")]
    theirs.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again", trust_remote_code=kind == "own")
    assert differing(tokenizer, again, texts[:100]) == []
