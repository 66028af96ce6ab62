"""The grid file: which runs there are, in stages, and that each of them is a run that the trainer would accept."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pretrain.config import Config
from pretrain.config_file import load_config
from pretrain.data.manifest import describe_first_error
from pretrain.errors import UserError
from pretrain.rules import check_config, check_layout

SEED = "train.seed"
# Where a run and its data lie; the sweep sets them, and they do not change what comes out.
PLACES = ("run.dir", "data.manifest")

Settings = dict[str, Any]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataPart(_Section):
    """How the data is made, always in the same way, or where it is.

    ``text`` names files and folders, relative to the working directory; without it, the text that every Python brings
    along. ``max_bytes`` of text are taken, all without it. The rest are arguments of tools.tokenizer and tools.shards.

    ``manifest``, alone, is the manifest.json of a data set that is there already, relative to the working directory.
    """

    manifest: Path | None = None
    text: tuple[Path, ...] | None = Field(default=None, min_length=1)
    max_bytes: int | None = Field(default=None, gt=0)
    vocab_size: int | None = Field(default=None, gt=0)
    sequence_length: int | None = Field(default=None, gt=0)
    validation_fraction: float | None = Field(default=None, gt=0, lt=1)

    @model_validator(mode="after")
    def _made_or_given(self) -> Self:
        needed = {"vocab_size", "sequence_length", "validation_fraction"}
        given = {name for name, value in self if value is not None}
        if given != {"manifest"} and ("manifest" in given or not needed <= given):
            raise ValueError(f"give manifest alone, or {', '.join(sorted(needed))} to have the data made")
        return self


class Stage(_Section):
    """Some of the runs: every variant with every combination of the values in ``vary``.

    ``variants`` are names of the grid's (default: all). ``take`` maps a setting to an earlier stage: its value is that
    of the variant's run with the lowest final validation loss there, among those that did not diverge.
    """

    variants: tuple[str, ...] | None = None
    settings: Settings = {}
    vary: dict[str, tuple[Any, ...]] = Field(min_length=1)
    take: dict[str, str] = {}


class GridFile(_Section):
    """The grid file, key for key.

    Attributes:
        title: heading of the table.
        note: a paragraph below it: what it shows and what it does not.
        base: configuration of all runs, relative to the grid file.
        work: folder of data and runs, relative to the working directory.
        processes: of each run, on this machine: one for each of its GPUs.
        keep_checkpoints: otherwise a run's checkpoints are removed once its result is recorded.
        diverged_above_unigram: nats per token; a run whose final validation loss is higher than the unigram entropy of
            the validation text by more than this has diverged.
        data: how the data is made.
        settings: of all runs.
        variants: name -> settings.
        stages: name -> stage, in the order in which they run.
    """

    title: str
    note: str = ""
    base: Path
    work: Path
    processes: int = Field(default=1, gt=0)
    keep_checkpoints: bool = False
    diverged_above_unigram: float = Field(ge=0, allow_inf_nan=False)
    data: DataPart
    settings: Settings = {}
    variants: dict[str, Settings] = Field(min_length=1)
    stages: dict[str, Stage] = Field(min_length=1)


@dataclass(frozen=True)
class Run:
    """One run of the grid.

    Attributes:
        id: stage/variant/setting=value/..., unique in the grid.
        stage, variant: names in the grid.
        column: the values that its stage varies beside the seed, as text; empty when it varies none.
        varied: setting -> value of this run, for what its stage varies.
        settings: dotted name -> value, without what is taken from another stage.
        take: setting -> stage that it is taken from.
    """

    id: str
    stage: str
    variant: str
    column: str
    varied: Settings
    settings: Settings
    take: dict[str, str]


@dataclass(frozen=True)
class Grid:
    """A grid file that was checked, and its runs in order."""

    path: Path
    file: GridFile
    runs: tuple[Run, ...]

    @property
    def base(self) -> Path:
        """Configuration file of all runs."""
        return self.path.parent / self.file.base

    @property
    def results_folder(self) -> Path:
        """Where results, table and curves are kept: beside the grid file, under its name."""
        return self.path.with_suffix("")

    @property
    def manifest(self) -> Path:
        """Manifest of the data, once it is there."""
        return self.file.data.manifest or self.file.work / "data" / "shards" / "manifest.json"

    def folder(self, run: Run) -> Path:
        """Where a run works."""
        return self.file.work / "runs" / run.id

    def run_dir(self, run: Run) -> Path:
        """The run's own ``run.dir``."""
        return self.folder(run) / "train"

    def overrides(self, run: Run, taken: Settings) -> list[str]:
        """Arguments of the trainer behind the base file."""
        settings = run.settings | taken | {"run.dir": str(self.run_dir(run)), "data.manifest": str(self.manifest)}
        return [f"{name}={_as_yaml(value)}" for name, value in settings.items()]

    def config(self, run: Run, taken: Settings) -> Config:
        """The resolved configuration of a run.

        Raises:
            UserError: naming the run, for settings that the trainer would refuse.
        """
        try:
            overrides = tuple(self.overrides(run, taken))
            return _checked_config(self.base, self.base.read_bytes(), overrides, self.file.processes)
        except UserError as error:
            raise UserError(f"{self.path}: run {run.id}: {error}") from None

    def first_candidates(self, run: Run) -> Settings:
        """A value that each taken setting may get: enough to check a run before it is known which it gets."""
        return {setting: self.file.stages[source].vary[setting][0] for setting, source in run.take.items()}

    def explicit_settings(self, run: Run) -> set[str]:
        """Names of the settings that the base file or the grid gives, others have their default."""
        return set(flat(_read_yaml(self.base))) | set(run.settings) | set(run.take)


def load_grid(path: Path) -> Grid:
    """Read a grid file and check every run of it.

    Raises:
        UserError: in one line, for whatever is wrong with the file or with a run.
    """
    tree = _read_yaml(path)
    if "stages" not in tree:
        raise UserError(
            f"{path}: it has no stages, so it is no sweep; python -m pretrain takes what configures one run"
        )
    try:
        file = GridFile.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}: {describe_first_error(error)}") from None
    file = file.model_copy(update={"settings": flat(file.settings)})
    _check_names(path, file)
    grid = Grid(path, file, tuple(run for name in file.stages for run in _runs_of(path, file, name)))
    if not grid.base.is_file():
        raise UserError(f"{path}: base={file.base}: there is no file {grid.base}")
    _refuse_duplicates(grid)
    for run in grid.runs:
        config = grid.config(run, grid.first_candidates(run))
        if not config.validation.every:
            raise UserError(f"{path}: run {run.id}: validation.every=0: a sweep compares validation losses; set it")
    return grid


def flat(tree: Mapping[str, Any], prefix: str = "") -> Settings:
    """Dotted names of a tree's leaves; names in the tree may be dotted already."""
    leaves: Settings = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": _number(value)}
    return leaves


def _number(value: Any) -> Any:
    """1e-3 without a point is a word to YAML 1.1, but nobody means one."""
    try:
        return float(value) if isinstance(value, str) and value[:1].isdigit() else value
    except ValueError:
        return value


@cache
def _checked_config(base: Path, content: bytes, overrides: tuple[str, ...], processes: int) -> Config:
    """``content`` is that of ``base``: a file edited while the sweep runs is read again, as the trainer does."""
    config = load_config(base, list(overrides))
    check_config(config)
    check_layout(config, processes)
    return config


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        _refuse_repeated_keys(yaml.compose(text, yaml.SafeLoader))
        tree = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must be keys with values (key: value)")
    return tree


def _refuse_repeated_keys(node: yaml.Node | None) -> None:
    """YAML itself would keep the last one and silently lose the others."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                raise ValueError(f"line {key.start_mark.line + 1}: {key.value} is given twice; remove one")
            seen.add(key.value)
            _refuse_repeated_keys(value)


def _check_names(path: Path, file: GridFile) -> None:
    """Stages and variants that are named exist, and no setting is given in two places of which one would be lost."""
    earlier: list[str] = []
    for name, stage in file.stages.items():
        where = f"{path}: stages.{name}"
        for variant in stage.variants or ():
            if variant not in file.variants:
                raise UserError(f"{where}.variants: {variant} is not a variant (there are {', '.join(file.variants)})")
        for setting, source in stage.take.items():
            if source not in earlier:
                raise UserError(f"{where}.take: {setting}: {source} is not an earlier stage")
            if setting not in file.stages[source].vary:
                raise UserError(f"{where}.take: stage {source} does not vary {setting}")
            if missing := set(_variants(file, stage)) - set(_variants(file, file.stages[source])):
                raise UserError(f"{where}.take: stage {source} has no runs of {', '.join(sorted(missing))}")
        for setting in (*stage.vary, *stage.take):
            places = [f"variants.{variant}" for variant in _variants(file, stage) if setting in file.variants[variant]]
            places += [f"stages.{name}.settings"] * (setting in stage.settings)
            places += [f"stages.{name}.take"] * (setting in stage.take and setting in stage.vary)
            if places:
                raise UserError(f"{where}: {setting} is also given in {places[0]}; remove one")
        earlier.append(name)


def _variants(file: GridFile, stage: Stage) -> tuple[str, ...]:
    return stage.variants or tuple(file.variants)


def _runs_of(path: Path, file: GridFile, stage_name: str) -> Iterator[Run]:
    stage = file.stages[stage_name]
    for variant in _variants(file, stage):
        for values in itertools.product(*stage.vary.values()):
            varied = flat(dict(zip(stage.vary, values, strict=True)))
            words = {name: f"{name.rpartition('.')[2]}={_as_yaml(value)}" for name, value in varied.items()}
            settings = file.settings | file.variants[variant] | flat(stage.settings) | varied
            if places := [name for name in PLACES if name in settings]:
                raise UserError(f"{path}: {places[0]} is set by the sweep itself; remove it")
            yield Run(
                id="/".join([stage_name, variant, *words.values()]),
                stage=stage_name,
                variant=variant,
                column=", ".join(word for name, word in words.items() if name != SEED),
                varied=varied,
                settings=settings,
                take=stage.take,
            )


def _refuse_duplicates(grid: Grid) -> None:
    """Within a stage; another stage may repeat a run on purpose."""
    seen: dict[str, str] = {}
    for run in grid.runs:
        for key in (run.id, f"{run.stage} {sorted(run.settings.items())}"):
            if key in seen:
                raise UserError(f"{grid.path}: {run.id} is the same run as {seen[key]}; remove one")
        seen |= {run.id: run.id, f"{run.stage} {sorted(run.settings.items())}": run.id}


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=2**30).splitlines()[0]
