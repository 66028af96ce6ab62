"""Every sweep in configs/paper is one that the trainer accepts and that fits the machine it asks for."""

from pathlib import Path

import pytest
import yaml

from pretrain.data.manifest import MANIFEST_NAME, Manifest
from pretrain.errors import UserError
from pretrain.plan.command import PlanRequest, make_plan
from tests.launch import REPOSITORY
from tests.tools.sweeps import content, write_grid
from tools.sweep.data import build_data, existing_data
from tools.sweep.grid import load_grid
from tools.sweep.runner import trainer

FOLDER = REPOSITORY / "configs/paper"
GRIDS = sorted(path for path in FOLDER.glob("*.yaml") if "stages" in yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_every_run_is_accepted(path: Path) -> None:
    grid = load_grid(path)
    planned = grid.config(grid.runs[0], grid.first_candidates(grid.runs[0]))
    for run in grid.runs:
        config = grid.config(run, grid.first_candidates(run))
        assert config.train.global_batch % (config.train.micro_batch * grid.file.processes) == 0
        assert config.model.vocab_size is None or config.model.output_bias == "none", "the papers have none"
    if planned.model.vocab_size is not None:
        assert make_plan(planned, PlanRequest(grid.file.processes)).fits


@pytest.mark.slow
@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_every_run_is_planned_and_fits(path: Path) -> None:
    grid = load_grid(path)
    for run in grid.runs:
        config = grid.config(run, grid.first_candidates(run))
        if config.model.vocab_size is not None:
            assert make_plan(config, PlanRequest(grid.file.processes)).fits, run.id


def test_data_that_are_there_are_named(tmp_path: Path, manifest: Manifest) -> None:
    place = str(manifest.directory / MANIFEST_NAME)
    given = load_grid(write_grid(tmp_path, content() | {"data": {"manifest": place}}))
    found = existing_data(given)
    assert found is not None
    assert build_data(given).fingerprint == found.fingerprint
    missing = load_grid(write_grid(tmp_path, content() | {"data": {"manifest": str(tmp_path / "none.json")}}))
    assert existing_data(missing) is None
    with pytest.raises(UserError, match=r"none\.json does not exist; build it as configs/paper/README.md says"):
        build_data(missing)
    with pytest.raises(UserError, match="give manifest alone, or sequence_length, validation_fraction, vocab_size"):
        load_grid(write_grid(tmp_path, content() | {"data": {"manifest": place, "vocab_size": 600}}))


def test_several_processes_are_started_by_torchrun(tmp_path: Path) -> None:
    tree = content()
    tree["settings"]["train.global_batch"] = 8
    grid = load_grid(write_grid(tmp_path, tree | {"processes": 2}))
    command = trainer(grid, grid.runs[0], {})
    assert command[1:8] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "pretrain"]
    with pytest.raises(UserError, match=r"train\.global_batch=4"):
        load_grid(write_grid(tmp_path, content() | {"processes": 2}))
