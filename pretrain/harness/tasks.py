"""Tasks of lm-evaluation-harness from local files: its own prompts and metrics, nothing fetched from a network.

A task of the ready list needs one file in the folder that ``--task-data`` names: the split that the harness judges, as
its source has it, under the task's name: ``hellaswag.parquet``, or ``.jsonl``.
"""

import importlib.util
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import UserError

_KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
ALL = "paper"
"""In the place of a task: the whole ready list."""


@dataclass(frozen=True)
class ReadyTask:
    """A task whose data need only be put there.

    Attributes:
        definition: its file among the harness's own.
        source: where its data are published: the data set on the Hugging Face hub, its part, and its split.
        stated: whether the papers are known to use it; the others are ours, to make up their twelve measures.
    """

    definition: str
    source: str
    stated: bool = True


READY: dict[str, ReadyTask] = {
    "lambada_openai": ReadyTask("lambada/lambada_openai.yaml", "EleutherAI/lambada_openai, default, test"),
    "wikitext": ReadyTask("wikitext/wikitext.yaml", "EleutherAI/wikitext_document_level, wikitext-2-raw-v1, test"),
    "hellaswag": ReadyTask("hellaswag/hellaswag.yaml", "Rowan/hellaswag, validation"),
    "piqa": ReadyTask("piqa/piqa.yaml", "baber/piqa, validation"),
    "arc_easy": ReadyTask("arc/arc_easy.yaml", "allenai/ai2_arc, ARC-Easy, test"),
    "arc_challenge": ReadyTask("arc/arc_challenge.yaml", "allenai/ai2_arc, ARC-Challenge, test"),
    "winogrande": ReadyTask("winogrande/default.yaml", "allenai/winogrande, winogrande_xl, validation"),
    "boolq": ReadyTask("super_glue/boolq/default.yaml", "aps/super_glue, boolq, validation", stated=False),
    "openbookqa": ReadyTask("openbookqa/openbookqa.yaml", "allenai/openbookqa, main, test", stated=False),
    "sciq": ReadyTask("sciq/sciq.yaml", "allenai/sciq, test", stated=False),
    "social_iqa": ReadyTask("siqa/siqa.yaml", "lighteval/siqa, validation", stated=False),
}
"""By name in the harness. With LAMBADA's two metrics they are twelve measures."""


def require_harness() -> Path:
    """See that the harness is installed, and let it be quiet and stay offline; the folder of its tasks.

    Raises:
        UserError: it is not.
    """
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.origin is None:
        raise UserError("--tasks needs lm-evaluation-harness; install the extra by: pip install -e '.[evaluate]'")
    # Read when its parts are imported. All that is needed lies in the files that the user names.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ[name] = "1"
    for name in ("lm_eval", "datasets", "evaluate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return Path(found.origin).parent / "tasks"


def load_tasks(names: Sequence[str], folder: Path | None) -> list[Any]:
    """The harness's task objects, their data read.

    Args:
        names: of the ready list, :data:`ALL` for the whole of it, or YAML files in the harness's own format.
        folder: of the ready list's data.

    Raises:
        UserError: the harness is not installed, or a task or its data cannot be used.
    """
    definitions = require_harness()
    wanted = dict.fromkeys(name for given in names for name in (READY if given == ALL else (given,)))
    configured = [
        _own(Path(name)) if name.endswith((".yaml", ".yml")) else _ready(name, folder, definitions) for name in wanted
    ]
    seen: dict[str, str] = {}
    for given, config in zip(wanted, configured, strict=True):
        other = seen.setdefault(config["task"], given)
        if other != given:
            raise UserError(f"--tasks {given} and {other} are both called {config['task']}; change `task` in one")
    return [_build(config) for config in configured]


def _ready(name: str, folder: Path | None, definitions: Path) -> dict[str, Any]:
    """A task's own definition, but with its data from a file."""
    if name not in READY:
        raise UserError(
            f"--tasks {name} is not in the ready list ({', '.join(READY)}; {ALL} for all); name a YAML file of your own"
        )
    if folder is None:
        raise UserError(f"--tasks {name} needs its data: name their folder by --task-data DIR")
    files = [file for suffix in _KINDS if (file := folder / f"{name}{suffix}").is_file()]
    if not files:
        raise UserError(
            f"--task-data {folder} has no {name}.parquet or .jsonl; put {READY[name].source} (Hugging Face hub) there"
        )
    config = _load_yaml(definitions / READY[name].definition)
    split = config.get("test_split") or config["validation_split"]
    # Zero-shot: no other split is asked for.
    config |= {"training_split": None, "validation_split": None, "test_split": split, "fewshot_split": None}
    kind = _KINDS[files[0].suffix]
    return config | {
        "dataset_path": kind,
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(files[0].resolve())}},
    }


def _own(file: Path) -> dict[str, Any]:
    """A definition of the user's; its data files are meant from its own folder."""
    if not file.is_file():
        raise UserError(f"--tasks {file} does not exist")
    config = _load_yaml(file)
    if not isinstance(config.get("task"), str):
        raise UserError(f"--tasks {file}: `task`, its name, is missing")
    if config.get("dataset_path") not in set(_KINDS.values()):
        raise UserError(
            f"--tasks {file}: dataset_path={config.get('dataset_path')} is no local file's kind; use json or parquet, "
            "and name files under dataset_kwargs.data_files"
        )
    kwargs = config.get("dataset_kwargs")
    named = kwargs.get("data_files") if isinstance(kwargs, dict) else None
    if not isinstance(named, dict):
        raise UserError(f"--tasks {file}: dataset_kwargs.data_files must map a split to a file")
    files = {split: (file.parent / str(name)).resolve() for split, name in named.items()}
    for path in files.values():
        if not path.is_file():
            raise UserError(f"--tasks {file}: there is no file {path}")
    for name in ("test_split", "validation_split", "training_split", "fewshot_split"):
        if (split := config.get(name)) is not None and split not in files:
            raise UserError(f"--tasks {file}: {name}={split} has no file under dataset_kwargs.data_files; name one")
    _refuse_foreign_metrics(file, config)
    config["dataset_kwargs"] = {"data_files": {split: str(path) for split, path in files.items()}}
    return config


def _refuse_foreign_metrics(file: Path, config: dict[str, Any]) -> None:
    """The harness would load a metric that it does not have as a program from a network."""
    from lm_eval.api import metrics
    from lm_eval.api.registry import metric_registry

    del metrics  # imported to fill the registry
    for listed in config.get("metric_list") or ():
        metric = listed.get("metric") if isinstance(listed, dict) else None
        if isinstance(metric, str) and (metric not in metric_registry or listed.get("hf_evaluate")):
            raise UserError(f"--tasks {file}: metric {metric} is none of the harness's own, and none is fetched")


def _load_yaml(file: Path) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        config: dict[str, Any] = load_yaml(file)
    except Exception as error:
        raise UserError(f"--tasks {file}: no task of the harness: {type(error).__name__}: {error}") from error
    return config


def _build(config: dict[str, Any]) -> Any:
    from lm_eval.api.task import ConfigurableTask

    config = {key: value for key, value in config.items() if key not in ("tag", "group", "task_list")}
    name = config["task"]
    try:
        task = ConfigurableTask(config=config)
    except StopIteration:
        raise UserError(f"task {name}: its data hold no document") from None
    except Exception as error:
        # A column that is missing, a file that is none: whatever comes of data that are not the task's.
        raise UserError(f"task {name}: its data cannot be used: {type(error).__name__}: {error}") from error
    if task.OUTPUT_TYPE == "generate_until":
        raise UserError(
            f"task {name} generates text, which is not offered here; export the checkpoint, and give lm_eval --model hf"
        )
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    return task


def run_tasks(tasks: Sequence[Any], model: Any, limit: int | None) -> list[dict[str, Any]]:
    """Every metric of every task: task, metric, value, standard_error (None where no formula gives it), documents."""
    from lm_eval import evaluate

    loaded = {"tasks": {task.config.task: task for task in tasks}, "groups": {}, "group_map": {}}
    found = evaluate(lm=model, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=False)
    rows = []
    for name, measured in found["results"].items():
        documents = found["n-samples"][name]["effective"]
        for key, value in measured.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, float) and kind and not metric.endswith("_stderr"):
                rows.append(
                    {
                        "task": name,
                        "metric": metric,
                        "value": value,
                        "standard_error": _error_of_a_share(metric, value, documents),
                        "documents": documents,
                    }
                )
    return rows


def _error_of_a_share(metric: str, value: float, documents: int) -> float | None:
    """Standard error of an accuracy, the mean over documents of zeros and ones."""
    if metric not in ("acc", "acc_norm") or documents < 2:
        return None
    return math.sqrt(value * (1 - value) / (documents - 1))
