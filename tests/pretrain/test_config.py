from pathlib import Path

import pytest
import yaml

from pretrain.config import Config
from pretrain.config_file import dump_config, load_config, setting_types
from pretrain.errors import UserError
from tests.launch import REPOSITORY

DEMO = REPOSITORY / "configs/demo.yaml"


def refusal(*overrides: str, path: Path = DEMO) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_overrides_replace_the_file() -> None:
    config = load_config(DEMO, ["train.steps=7", "optimizer.lr=1e-3", "model.residual.clamp=none", "parallel.sp=true"])
    assert config.train.steps == 7
    assert config.optimizer.lr == 1e-3
    assert config.model.residual.clamp == "none"
    assert config.parallel.sp is True


def test_the_written_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(DEMO, ["model.num_query_groups=2"])
    assert load_config(written(tmp_path, dump_config(config)), []) == config


@pytest.mark.parametrize(
    "name",
    [
        *(
            "model.hidden_size",
            "model.residual.scheme",
            "model.output_bias",
            "parallel.tp",
            "parallel.sp",
            "parallel.pp",
        ),
        *("zero.stage", "train.steps", "train.micro_batch", "train.global_batch", "train.seed", "data.manifest"),
        *("checkpoint.every", "run.dir"),
    ],
)
def test_names_that_scripts_rely_on(name: str) -> None:
    assert name in setting_types(Config)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("train.stpes=5", "train.stpes is not a setting; did you mean train.steps?"),
        ("model.hiden_size=5", "model.hiden_size is not a setting; did you mean model.hidden_size?"),
        ("residual.scheme=proj", "residual is not a setting; did you mean model.residual?"),
        ("steps=5", "steps is not a setting; did you mean train.steps?"),
        ("model.residual.klamp=1", "model.residual.klamp is not a setting; did you mean model.residual.clamp?"),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, hint: str) -> None:
    assert hint in refusal(override)


def test_an_unknown_key_in_the_file(tmp_path: Path) -> None:
    tree = yaml.safe_load(DEMO.read_text())
    tree["optimizer"]["learning_rat"] = 1
    message = refusal(path=written(tmp_path, yaml.safe_dump(tree)))
    assert "optimizer.learning_rat is not a setting" in message
    assert "run.yaml" in message


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("train.steps=many", "train.steps='many': input should be a valid integer"),
        ("train.steps=0", "train.steps=0: input should be greater than 0"),
        ("model.residual.clamp=wide", "model.residual.clamp='wide': input should be a valid number"),
        ("model.activation=relu", "model.activation='relu': input should be 'swiglu', 'gelu' or 'gelu_tanh'"),
        ("zero.stage=4", "zero.stage=4: input should be 0, 1, 2 or 3"),
        ("optimizer.lr=-1", "optimizer.lr=-1: input should be greater than 0"),
        ("optimizer.lr=.inf", "optimizer.lr=inf: input should be a finite number"),
        ("train.seed=18446744073709551616", "train.seed=18446744073709551616: input should be less than"),
        ("model.residual=geonorm", "model.residual is a section; give model.residual.KEY=VALUE with scheme, p, decay"),
    ],
)
def test_a_wrong_value_names_the_setting(override: str, fault: str) -> None:
    assert fault in refusal(override)


def test_a_missing_setting_says_how_to_give_it(tmp_path: Path) -> None:
    tree = yaml.safe_load(DEMO.read_text())
    del tree["model"]["hidden_size"]
    assert "model.hidden_size is missing; give it in the file or as model.hidden_size=VALUE" in refusal(
        path=written(tmp_path, yaml.safe_dump(tree))
    )


@pytest.mark.parametrize("override", ["train.steps", "=5", "--steps=5"])
def test_a_broken_override(override: str) -> None:
    assert "an override is written section.key=value" in refusal(override)


def test_an_unknown_key_lists_its_section() -> None:
    assert "(optimizer has lr, min_lr, warmup_steps," in refusal("optimizer.learning_rate=1")


def test_an_override_is_blamed_itself() -> None:
    assert refusal("optimizer.lr=1e-3x").startswith("argument 'optimizer.lr=1e-3x': optimizer.lr='1e-3x': ")
    assert refusal("train.stpes=5").startswith("argument 'train.stpes=5': train.stpes is not a setting")


@pytest.mark.parametrize("name", ["train.micro_batch", "parallel.tp", "model.num_layers", "model.residual.clamp"])
def test_a_truth_value_is_no_number(name: str) -> None:
    assert f"{name}=true: must not be true or false" in refusal(f"{name}=true")


def test_an_override_below_a_value() -> None:
    assert "steps is not a section" in refusal("train.steps.more=1")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("train: {steps: 1, steps: 2}", "line 1: steps is given twice"),
        ("a: [", "not valid YAML"),
        ("just text", "must be sections of settings"),
        ("", "must be sections of settings"),
        ("train: 5", "train is a section; give train.KEY=VALUE with steps, micro_batch"),
        ("checkpoint: &e {every: 5}\nlogging: *e", "line 2: aliases (*name) are not supported"),
        ("? [a, b]\n: 1", "line 1: the name of a setting must be a word"),
        ("train: {steps: 2020-13-45}", "not valid YAML"),
        ("train: {steps: !!int abc}", "not valid YAML"),
        ("train: {steps: !!bool abc}", "not valid YAML"),
        ('run: {dir: "a\\0b"}', "run.dir holds a NUL character"),
        ("a: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_a_broken_file(tmp_path: Path, text: str, fault: str) -> None:
    assert fault in refusal(path=written(tmp_path, text))


def test_a_file_that_is_not_there() -> None:
    assert "configs/nothing.yaml: cannot read the configuration" in refusal(path=Path("configs/nothing.yaml"))


def test_a_list_of_data_sets_is_read_and_written(tmp_path: Path) -> None:
    config = load_config(DEMO, ["data.manifest=null", "data.datasets=[{manifest: a, weight: 2}, {manifest: b}]"])
    assert [(str(entry.manifest), entry.weight) for entry in config.data.datasets] == [("a", 2), ("b", 1)]
    assert load_config(written(tmp_path, dump_config(config)), []) == config


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ("{weight: 1}", "data.datasets.1.manifest is missing; give it in data.datasets"),
        ("{manifest: b, weight: 0}", "data.datasets.1.weight=0: input should be greater than 0"),
        ("{manifest: b, weight: true}", "data.datasets.1.weight=True: input should be a valid number"),
        ("{manifest: b, max_epochs: 0}", "data.datasets.1.max_epochs=0: input should be greater than 0"),
        ("{manifest: b, wieght: 2}", "data.datasets.1.wieght=2: extra inputs are not permitted"),
        ("{manifest: b, name: a/b}", "data.datasets.1.name='a/b': string should match pattern"),
        ("b", "data.datasets.1='b': input should be a valid dictionary or instance of DatasetSettings"),
    ],
)
def test_a_wrong_entry_of_a_list_is_named_by_its_place(entry: str, fault: str) -> None:
    override = f"data.datasets=[{{manifest: a}}, {entry}]"
    assert refusal(override).startswith(f"argument {override!r}: {fault}")
