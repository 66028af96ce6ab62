"""The commands on real runs: from a Llama of transformers through training and back, and out of a sphere's run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pretrain.data.manifest import load_manifest
from pretrain.data.tokenizer import Tokenizer
from tests.launch import REPOSITORY
from tests.pretrain import runs

pytestmark = pytest.mark.dist

# At such a rate no weight changes, so that what goes out is what came in.
STILL = ["optimizer.lr=1e-30", "optimizer.min_lr=0", "train.steps=3", "validation.every=0"]


def pretrain(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pretrain", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_a_llama_comes_in_is_trained_in_another_layout_and_goes_out(manifest: Path, tmp_path: Path) -> None:
    data = load_manifest(manifest)
    shape = {"vocab_size": data.vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5}
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).save_pretrained(tmp_path / "theirs")
    done = pretrain("import", tmp_path / "theirs", "--from", "hf", "--to", tmp_path / "weights")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"with the settings of {tmp_path / 'weights' / 'config.yaml'}" in done.stdout

    run, log = tmp_path / "run", tmp_path / "log"
    settings = [*STILL, f"data.manifest={manifest}", f"run.dir={run}", f"train.init_from={tmp_path / 'weights'}"]
    settings += ["model.residual.scheme=pre_norm", "model.output_bias=none", "parallel.tp=2", "train.precision=bf16"]
    runs.finish(runs.start(settings, 2, log), log)
    assert f"3 steps from the weights of {tmp_path / 'weights'}" in log.read_text()

    done = pretrain("export", run, "--to", "hf", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "LlamaForCausalLM, fp32, step 3 of" in done.stdout
    assert "trust_remote_code" not in done.stdout
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not list((tmp_path / "out").glob("*.py"))
    check_tokenizer(tmp_path / "out", data.tokenizer_file, data.eod_id)


def check_tokenizer(folder: Path, file: Path | None, eod_id: int) -> None:
    assert file is not None
    ours, theirs = Tokenizer(file, eod_id), AutoTokenizer.from_pretrained(folder)
    assert (theirs.eos_token_id, len(theirs)) == (eod_id, ours.vocab_size)
    text = (REPOSITORY / "LICENSE").read_text()
    assert theirs(text).input_ids == ours.processor.encode(text)


def test_a_run_on_the_sphere_goes_out_with_its_code(manifest: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    settings = [f"data.manifest={manifest}", f"run.dir={run}", "train.steps=3", "validation.every=0"]
    runs.finish(runs.start([*settings, "model.residual.scheme=cayley"], 1, log), log)
    done = pretrain("export", run / "checkpoints" / "step-00000003", "--out", tmp_path / "out", "--dtype", "bf16")
    assert (done.returncode, done.stderr) == (0, "")
    assert "SpherePretrainForCausalLM, bf16, step 3 of" in done.stdout
    assert done.stdout.count("trust_remote_code=True") == 2  # for the model and for the tokenizer
    assert "LlamaForCausalLM has no scheme cayley, output_bias=unigram: our modelling files are shipped" in done.stdout
    assert {path.name for path in (tmp_path / "out").glob("*.py")} == {
        "configuration_sphere_pretrain.py",
        "residual_sphere_pretrain.py",
        "modeling_sphere_pretrain.py",
    }
