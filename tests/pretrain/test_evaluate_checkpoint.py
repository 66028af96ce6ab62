"""``python -m pretrain evaluate`` on a real run, beside its own losses, plain sums, the harness, the exported model."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.checkpoint import store
from pretrain.data.manifest import load_manifest
from pretrain.data.reader import ShardReader
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.evaluate_checkpoint import Evaluation, read_documents, run_evaluation, shard_figures, text_figures
from pretrain.export.hf import Export, export
from pretrain.harness.model import CheckpointModel
from pretrain.harness.tasks import READY, load_tasks, require_harness, run_tasks
from pretrain.inspect_checkpoint import find_checkpoint, load_model, recorded_config
from pretrain.scoring import Scorer, Span, windows
from tests.launch import REPOSITORY
from tests.pretrain import runs
from tests.pretrain.export import shipped_code

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("single_process")]

LENGTH = 32
TEXT = REPOSITORY / "LICENSE"
QUESTIONS = [
    {"question": f"What is {number} plus nothing?", "choices": [str(number), "many", "none at all"], "answer": 0}
    for number in range(7)
]
OWN_TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
HELLASWAG = {
    "activity_label": "Reading",
    "ctx_a": "A person opens a book.",
    "ctx_b": "they",
    "endings": ["read it.", "eat it.", "paint it blue.", "sail away."],
    "label": "0",
}


@pytest.fixture(scope="module")
def run(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps in fp32 at a high rate, so that likelihoods differ."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    settings = [f"data.manifest={manifest}", f"run.dir={folder}", "train.steps=8", "train.precision=fp32"]
    log = folder.parent / "log"
    runs.finish(runs.start([*settings, "optimizer.lr=1e-2", "parallel.tp=2"], 2, log), log)
    return folder


@pytest.fixture(scope="module")
def tokenizer(manifest: Path) -> Tokenizer:
    file = load_manifest(manifest).tokenizer_file
    assert file is not None
    return Tokenizer(file)


@pytest.fixture
def module(run: Path) -> torch.nn.Module:
    checkpoint = find_checkpoint(run)
    record = store.read_record(checkpoint)
    return load_model(recorded_config(checkpoint, record), checkpoint, record["vocab_size"], torch.device("cpu"))


def scorer_of(module: torch.nn.Module, tokenizer: Tokenizer, micro_batch: int = 3, separate: bool = False) -> Scorer:
    return Scorer(module, tokenizer.vocab_size, tokenizer.eod_id, micro_batch, separate)


@torch.no_grad()
def log_probabilities(module: torch.nn.Module, tokens: Sequence[int], vocab_size: int) -> torch.Tensor:
    """Plainly, of one sequence: [tokens, vocabulary]."""
    row = torch.tensor([list(tokens)])
    logits: torch.Tensor = module(row, torch.arange(row.shape[1])[None], None)
    return logits[0, :, :vocab_size].double().log_softmax(-1)


def test_shards_as_in_the_run(run: Path, manifest: Path, module: torch.nn.Module, tokenizer: Tokenizer) -> None:
    reader = ShardReader(load_manifest(manifest), "validation", LENGTH)
    found = shard_figures(scorer_of(module, tokenizer), reader, 6)
    assert found.loss == pytest.approx(runs.curve(run, "validation/loss")[8], rel=1e-6)
    assert found.bits_per_byte == pytest.approx(runs.curve(run, "validation/bits_per_byte")[8], rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.tokens == 6 * LENGTH


def test_a_text_to_its_last_byte(module: torch.nn.Module, tokenizer: Tokenizer) -> None:
    texts = [TEXT.read_text()[:900], "short", "é" * 40]
    nats, count = 0.0, 0
    for text in texts:
        tokens = [tokenizer.eod_id, *tokenizer.processor.encode(text)]
        for place in range(1, len(tokens)):
            # What the model may read before this token: a whole window, but for the text's beginning.
            number = (place - 1) // LENGTH
            end = min((number + 1) * LENGTH, len(tokens) - 1)
            before = tokens[max(0, end - LENGTH) : place]
            nats -= float(log_probabilities(module, before, tokenizer.vocab_size)[-1, tokens[place]])
            count += 1
    found = text_figures(scorer_of(module, tokenizer), tokenizer, "texts", texts, LENGTH)
    assert (found.tokens, found.text_bytes) == (count, sum(len(text.encode()) for text in texts))
    assert found.loss == pytest.approx(nats / count, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / sum(len(text.encode()) for text in texts))


def test_spans_are_judged_alike_in_any_company(module: torch.nn.Module, tokenizer: Tokenizer) -> None:
    draw = np.random.default_rng(0)
    rows = [draw.integers(3, tokenizer.vocab_size, size=size).tolist() for size in (33, 2, 17, 9, 30)]
    spans = [Span(row, judged) for row, judged in zip(rows, (32, 1, 5, 8, 1), strict=True)]
    best = int(log_probabilities(module, [5, 6], tokenizer.vocab_size)[-1].argmax())
    spans += [Span([5, 6, best], 1), Span([5, 6, best - 1], 1)]
    together = scorer_of(module, tokenizer, micro_batch=4).spans(spans)
    alone = scorer_of(module, tokenizer, micro_batch=1).spans(spans)
    assert [each.log for each in together] == pytest.approx([each.log for each in alone], rel=1e-5)
    for span, found in zip(spans, together, strict=True):
        logs = log_probabilities(module, span.tokens[:-1], tokenizer.vocab_size)
        judged = range(len(span.tokens) - span.judged, len(span.tokens))
        assert found.log == pytest.approx(sum(float(logs[at - 1, span.tokens[at]]) for at in judged), rel=1e-5)
        assert found.is_greedy == all(int(logs[at - 1].argmax()) == span.tokens[at] for at in judged)
    assert [found.is_greedy for found in together[-2:]] == [True, False]


def test_documents_kept_apart_are_read_apart(module: torch.nn.Module, tokenizer: Tokenizer) -> None:
    eod, text = tokenizer.eod_id, [7, 8, 9, 10]
    (found,) = scorer_of(module, tokenizer, separate=True).spans([Span([eod, *text], 4)])
    first = log_probabilities(module, [eod], tokenizer.vocab_size)[0, text[0]]
    rest = log_probabilities(module, text[:-1], tokenizer.vocab_size)
    assert found.log == pytest.approx(float(first + sum(rest[at, text[at + 1]] for at in range(3))), rel=1e-5)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 100])
def test_texts_are_divided_as_the_harness_divides_them(size: int) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokens = list(range(100, 100 + size))
    pairs = map(make_disjoint_window, get_rolling_token_windows(tokens, 1, LENGTH, 1))
    # Its models of transformers cut what they read to this, from the left.
    read = [((before + judged)[-LENGTH - 1 :], len(judged)) for before, judged in pairs]
    assert [(list(span.tokens), span.judged) for span in windows(tokens, 1, LENGTH)] == read


def exported_model(run: Path, folder: Path) -> tuple[Any, Any]:
    export(Export(run, folder), torch.device("cpu"))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@torch.no_grad()
def theirs(model: Any, tokenizer: Any, context: str, answer: str) -> tuple[float, bool]:
    """As the harness asks a model of transformers."""
    before = tokenizer(context).input_ids if context else [tokenizer.bos_token_id]
    whole = tokenizer(context + answer).input_ids if context else [*before, *tokenizer(answer).input_ids]
    whole, count = whole[-LENGTH - 1 :], len(whole) - len(before)
    logs = model(torch.tensor([whole[:-1]])).logits[0].double().log_softmax(-1)[-count:]
    chosen = torch.tensor(whole[-count:])
    return float(logs.gather(1, chosen[:, None]).sum()), bool((logs.argmax(-1) == chosen).all())


def test_the_real_harness_and_the_exported_model(
    run: Path, module: torch.nn.Module, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    shipped_code.kept_in(tmp_path / "modules", monkeypatch)
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    (tmp_path / "sums.yaml").write_text(OWN_TASK)
    (tmp_path / "hellaswag.jsonl").write_text(json.dumps(HELLASWAG) + "\n")
    page = {"page": " = Robert = \n\n Robert is an actor . He had a role @-@ model in 2000 . \n" * 3}
    (tmp_path / "wikitext.jsonl").write_text(json.dumps(page) + "\n")
    (tmp_path / "lambada_openai.jsonl").write_text(json.dumps({"text": "the quick brown fox saw the dog"}) + "\n")
    tasks = load_tasks([str(tmp_path / "sums.yaml"), "hellaswag", "wikitext", "lambada_openai"], tmp_path)
    scorer = scorer_of(module, tokenizer)
    model = CheckpointModel(scorer, tokenizer, LENGTH)
    rows = {(row["task"], row["metric"]): row for row in run_tasks(tasks, model, None)}

    hf_model, hf_tokenizer = exported_model(run, tmp_path / "exported")
    answers = [
        [theirs(hf_model, hf_tokenizer, f"Q: {each['question']}\nA:", f" {choice}") for choice in each["choices"]]
        for each in QUESTIONS
    ]
    requests = [instance for task in tasks if task.config.task == "sums" for instance in task.instances]
    ours = model.loglikelihood(requests, disable_tqdm=True)
    flat = [answer for question in answers for answer in question]
    assert [log for log, _ in ours] == pytest.approx([log for log, _ in flat], rel=1e-5)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in flat]
    right = [max(range(3), key=lambda choice: question[choice][0]) == 0 for question in answers]
    assert rows["sums", "acc"]["value"] == pytest.approx(sum(right) / len(right))
    assert rows["sums", "acc"]["documents"] == len(QUESTIONS)
    perplexity = math.exp(-theirs(hf_model, hf_tokenizer, "the quick brown fox saw the", " dog")[0])
    assert rows["lambada_openai", "perplexity"]["value"] == pytest.approx(perplexity, rel=1e-5)
    whole = text_figures(scorer, tokenizer, "", [_detokenized(tasks)], LENGTH)
    bits = whole.bits_per_byte
    assert bits is not None
    bytes_as_stored = len(page["page"].encode())
    assert rows["wikitext", "bits_per_byte"]["value"] == pytest.approx(bits * whole.text_bytes / bytes_as_stored)
    assert rows["hellaswag", "acc_norm"]["value"] in (0.0, 1.0)
    assert model.loglikelihood([_Request(("", "and so on"))], disable_tqdm=True)[0][0] == pytest.approx(
        theirs(hf_model, hf_tokenizer, "", "and so on")[0], rel=1e-5
    )


class _Request:
    def __init__(self, arguments: tuple[str, str]) -> None:
        self.args = arguments


def _detokenized(tasks: Sequence[Any]) -> str:
    task = next(task for task in tasks if task.config.task == "wikitext")
    text: str = task.instances[0].args[0]
    return text


def test_the_ready_list_names_tasks_of_the_harness() -> None:
    from lm_eval.tasks._yaml_loader import load_yaml

    definitions = require_harness()
    for name, ready in READY.items():
        config = load_yaml(definitions / ready.definition)
        assert config["task"] == name
        split = config.get("test_split") or config["validation_split"]
        parts = [config["dataset_path"], config.get("dataset_name"), split]
        assert ready.source == ", ".join(part for part in parts if part)


def test_as_a_user_calls_it(run: Path, manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text('{"text": "one text"}\n{"text": "another"}\n')
    arguments = ["--text", str(TEXT), str(tmp_path / "two.jsonl"), "--shards", str(manifest), "--samples", "6"]
    command = [sys.executable, "-m", "pretrain", "evaluate", str(run), *arguments, "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["step"], printed["precision"]) == (8, "fp32")
    licence, two, shards = printed["texts"]
    assert licence["text_bytes"] == TEXT.stat().st_size
    assert two["text_bytes"] == len("one textanother")
    assert shards["loss"] == pytest.approx(runs.curve(run, "validation/loss")[8], rel=1e-6)


def mistakes(folder: Path) -> dict[str, tuple[Evaluation, str]]:
    empty, latin, broken = folder / "empty.txt", folder / "latin.txt", folder / "broken.jsonl"
    empty.write_text("\n")
    latin.write_bytes("é".encode("latin-1"))
    broken.write_text('{"text": "good"}\n{"txt": "bad"}\n')
    own = folder / "own.yaml"
    own.write_text("task: own\ndataset_path: json\ndataset_kwargs: {data_files: {test: nowhere.jsonl}}\n")
    (folder / "one.jsonl").write_text('{"a": "b"}\n')
    head = "task: own\ndataset_path: json\ndataset_kwargs: {data_files: {test: one.jsonl}}\n"
    written = {
        "foreign.yaml": head + "metric_list: [{metric: wiki_split}]",
        "loaded.yaml": head + "metric_list: [{metric: acc, hf_evaluate: true}]",
        "split.yaml": head + "test_split: val",
        "again.yaml": head,
        "other.yaml": head,
        "number.yaml": "task: own\ndataset_path: json\ndataset_kwargs: 5\n",
    }
    for name, text in written.items():
        (folder / name).write_text(text)
    (folder / "openbookqa.jsonl").touch()
    hub = folder / "hub.yaml"
    hub.write_text("task: hub\ndataset_path: somebody/something\n")
    (folder / "piqa.jsonl").write_text('{"goal": "no solutions"}\n')
    run = folder / "run"
    return {
        "nothing": (Evaluation(run), "nothing to evaluate on: give --text FILE, --shards MANIFEST or --tasks NAME"),
        "no file": (Evaluation(run, texts=[folder / "none"]), "none cannot be read: No such file"),
        "empty": (Evaluation(run, texts=[empty]), "empty.txt: empty"),
        "latin": (Evaluation(run, texts=[latin]), "latin.txt: not UTF-8"),
        "broken": (Evaluation(run, texts=[broken]), "broken.jsonl, line 2: no field 'text'"),
        "no folder": (Evaluation(run, tasks=["piqa"]), "needs its data: name their folder by --task-data DIR"),
        "no task": (Evaluation(run, tasks=["chess"], task_data=folder), "--tasks chess is not in the ready list"),
        "no data": (
            Evaluation(run, tasks=["sciq"], task_data=folder),
            "has no sciq.parquet or .jsonl; put allenai/sciq",
        ),
        "other data": (Evaluation(run, tasks=["piqa"], task_data=folder), "task piqa: its data cannot be used: "),
        "own without data": (Evaluation(run, tasks=[str(own)]), "there is no file "),
        "no documents": (Evaluation(run, tasks=["openbookqa"], task_data=folder), "its data hold no document"),
        **{
            name: (Evaluation(run, tasks=[str(folder / each) for each in files]), message)
            for name, files, message in [
                ("no data files", ["number.yaml"], "dataset_kwargs.data_files must map a split to a file"),
                ("no such split", ["split.yaml"], "test_split=val has no file under dataset_kwargs.data_files"),
                ("unknown metric", ["foreign.yaml"], "metric wiki_split is none of the harness's own"),
                ("metric to load", ["loaded.yaml"], "metric acc is none of the harness's own, and none is fetched"),
                ("two of a name", ["again.yaml", "other.yaml"], "again.yaml are both called own; change `task` in one"),
            ]
        },
        "from a network": (Evaluation(run, tasks=[str(hub)]), "is no local file's kind; use json or parquet"),
    }


def test_mistakes_are_told_before_anything_is_computed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(run)
    for name, (asked, message) in mistakes(tmp_path).items():
        with pytest.raises(UserError) as raised:
            run_evaluation(asked)
        assert message in str(raised.value), name


def test_shards_of_another_tokenizer_are_refused(run: Path, manifest: Path, tmp_path: Path) -> None:
    runs.python(
        *("tools.tokenizer", "train", "--input", str(manifest.parent.parent / "documents.jsonl")),
        *("--vocab-size", "400", "--out", str(tmp_path / "other.model")),
    )
    runs.python(
        *("tools.shards", "build", "--input", str(manifest.parent.parent / "documents.jsonl")),
        *("--tokenizer", str(tmp_path / "other.model"), "--sequence-length", "32", "--out", str(tmp_path / "other")),
    )
    with pytest.raises(UserError, match="evaluate on the text itself by --text, and compare bits per byte"):
        run_evaluation(Evaluation(run, shards=[str(tmp_path / "other")]))


def test_documents_of_a_file_are_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b" a\r\nb\n")
    assert read_documents(tmp_path / "a.txt") == [" a\r\nb\n"]
