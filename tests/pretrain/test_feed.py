import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain.config_file import load_config
from pretrain.data.manifest import Manifest, load_manifest
from pretrain.data.order import SampleOrder
from pretrain.data.shard_index import load_index
from pretrain.feed import needs_tokens
from pretrain.parallel import Place
from tests.launch import REPOSITORY, launch
from tests.pretrain.feed_worker import GLOBAL_BATCH, LENGTH, LIMIT, STEPS


def damaged(manifest: Path, out: Path, samples: list[int]) -> Path:
    """A copy whose samples of these ids have a flipped bit."""
    folder = Path(shutil.copytree(manifest.parent, out))
    shard = load_manifest(folder).splits["train"].shards[0]
    index = load_index((folder / shard.file).with_suffix(".idx"))
    content = bytearray((folder / shard.file).read_bytes())
    ends = np.cumsum(index.rows.astype(np.int64))
    for sample in samples:
        member = int(np.searchsorted(ends, sample, side="right"))
        row = sample - int(ends[member] - index.rows[member])
        content[int(index.offsets[member]) + row * index.header.row_bytes] ^= 1
    (folder / shard.file).write_bytes(content)
    return folder


def drawn(manifest: Manifest, *draws: int) -> list[int]:
    """Samples that these global draws take."""
    seed = load_config(REPOSITORY / "configs/demo.yaml", []).train.seed
    (shard,) = manifest.splits["train"].shards
    assert manifest.sequence_length == LENGTH
    return [SampleOrder([shard.samples], seed).sample_id(draw) for draw in draws]


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_bad_samples_are_masked_counted_and_stop_all_ranks(manifest: Path, tmp_path: Path, layout: str) -> None:
    """Only the second rank's copy is damaged: one sample of steps 1 and 2 each, then more than are allowed."""
    bad = [6, 13, 22, 23]
    assert len(bad) > LIMIT
    sound = Path(shutil.copytree(manifest.parent, tmp_path / "sound"))
    other = damaged(manifest, tmp_path / "damaged", drawn(load_manifest(manifest), *bad))
    outputs = launch("tests.pretrain.feed_worker", 2, layout, str(sound), str(other))
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    masks = np.ones((STEPS, GLOBAL_BATCH))
    masks.reshape(-1)[bad] = 0
    halves = (masks, masks) if layout == "tp2" else (masks[:, :4], masks[:, 4:])
    for result, expected in zip(results, halves, strict=True):
        np.testing.assert_array_equal(result["masks"], expected)
        assert result["counts"] == [0, 2, 2]
        assert result["error"] == (
            "4 of 32 samples were damaged, more than data.max_bad_samples=3 in a million; "
            "python -m tools.shards verify MANIFEST finds the files to restore"
        )


@pytest.mark.parametrize(("separate", "reading"), [("false", [True, False, False, True]), ("true", [True] * 4)])
def test_stages_between_the_ends_of_a_pipeline_need_no_tokens(separate: str, reading: list[bool]) -> None:
    config = load_config(REPOSITORY / "configs/demo.yaml", ["parallel.pp=4", f"data.separate_documents={separate}"])
    places = [Place(torch.device("cpu"), pp_rank, 4, 0, pp_rank, 0, 1) for pp_rank in range(4)]
    assert [needs_tokens(config, place) for place in places] == reading
