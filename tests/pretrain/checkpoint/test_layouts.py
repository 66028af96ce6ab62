"""What was saved in one layout goes on in any other, over twenty steps."""

import json
from pathlib import Path

import pytest

from tests.launch import launch

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_run_goes_on_in_any_layout_and_zero_stage(tmp_path: Path, world_size: int) -> None:
    launch("tests.pretrain.checkpoint.layouts_worker", world_size, str(tmp_path))
    for saved, runs in json.loads((tmp_path / "losses.json").read_text()).items():
        stayed = runs.pop("stayed")
        assert len(stayed) == 20
        assert max(stayed) - min(stayed) > 0.1, "nothing was learned, so nothing was compared"
        for loaded, losses in runs.items():
            case = f"{saved} -> {loaded}"
            if loaded == saved:
                assert losses == stayed, case
            assert losses[0] == pytest.approx(stayed[0], rel=1e-6), case
            assert losses[-1] == pytest.approx(stayed[-1], rel=1e-4), case


@pytest.mark.slow
def test_saving_and_loading_take_the_memory_of_one_parameter(tmp_path: Path) -> None:
    """And a fixed buffer, for which 64 MB are left; 3.8 GB are written and read."""
    (output,) = launch("tests.pretrain.checkpoint.memory_worker", 1, str(tmp_path), timeout=1200)
    found = json.loads(output.splitlines()[-1])
    print(found)
    assert found["parameters"] > 300e6
    for action in ("save", "load"):
        assert found[action] < found["largest"] + 64e6, action
