import json
import shutil
from pathlib import Path

import pytest

from pretrain.data.manifest import load_manifest
from tests.launch import launch


@pytest.mark.dist
def test_ranks_that_see_something_else_are_told_so_alike(manifest: Path, tmp_path: Path) -> None:
    """The second rank's folder holds other data of the same name, sizes and tokenizer."""
    other = Path(shutil.copytree(manifest.parent, tmp_path / "other")) / "manifest.json"
    content = json.loads(other.read_text())
    content["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
    other.write_text(json.dumps(content))
    first, second = (load_manifest(path).fingerprint[:12] for path in (manifest, other))
    outputs = launch("tests.pretrain.agreement_worker", 2, str(manifest), str(other))
    assert outputs[0] == outputs[1]
    lines = outputs[0].splitlines()
    assert lines[:5] == [
        "agreed",
        "run.dir=run is in use by another run; stop it or choose another run.dir",
        "run.dir=run: ranks found checkpoints of different steps (0 and 3); "
        "put run.dir on a file system that all nodes share",
        f"data set data is {first} on global rank 0 and {second} on global rank 1; give all nodes the same files",
        f"data set b is {first} on global rank 0 and {second} on global rank 1; give all nodes the same files",
    ]
    for line in lines[5:]:
        assert line.startswith("the mixture or the place in it is ")
        assert line.endswith("on global rank 1; start all nodes with the same settings of data and train")
    assert len(lines) == 7
