import dataclasses
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from pretrain.data import reader as reader_module
from pretrain.data.folder import LocalFolder
from pretrain.data.manifest import Manifest
from pretrain.data.reader import ShardReader
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tests.pretrain.data.small import SEQUENCE_LENGTH, layout
from tools.shard_writer import SplitWriter


def stored_samples(manifest: Manifest, split: str) -> np.ndarray:
    """All stored samples, read by tarfile and numpy alone."""
    blocks = []
    for shard in manifest.splits[split].shards:
        with tarfile.open(manifest.directory / shard.file) as tar:
            for entry in tar:
                content = tar.extractfile(entry)
                assert content is not None
                blocks.append(np.load(io.BytesIO(content.read())))
    return np.concatenate(blocks)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_sample_is_what_the_tars_hold(manifest: Manifest, split: str) -> None:
    reader = ShardReader(manifest, split, SEQUENCE_LENGTH)
    stored = stored_samples(manifest, split)
    assert len(reader) == len(stored) == manifest.splits[split].samples
    assert sum(reader.shard_sizes) == len(reader)
    for sample_id in reversed(range(len(reader))):
        sample = reader.read(sample_id)
        assert sample.dtype == np.int64
        np.testing.assert_array_equal(sample, stored[sample_id])


def test_the_data_set_exercises_the_layout(manifest: Manifest) -> None:
    train = manifest.splits["train"]
    assert len(train.shards) > 3
    assert train.shards[-1].samples < train.shards[0].samples


def test_shorter_sequences_cut_the_same_stream(manifest: Manifest) -> None:
    whole = ShardReader(manifest, "train", SEQUENCE_LENGTH)
    short = ShardReader(manifest, "train", SEQUENCE_LENGTH // 4)
    assert len(short) == 4 * len(whole)
    assert short.shard_sizes == [4 * size for size in whole.shard_sizes]
    assert short.read(0).shape == (SEQUENCE_LENGTH // 4 + 1,)
    stream = [token for sample_id in range(len(whole)) for token in whole.read(sample_id)[1:]]
    assert [token for sample_id in range(len(short)) for token in short.read(sample_id)[1:]] == stream


def test_many_samples_are_read_as_each_alone(manifest: Manifest) -> None:
    for length in (SEQUENCE_LENGTH, SEQUENCE_LENGTH // 4):
        reader = ShardReader(manifest, "train", length)
        ids = np.random.default_rng(1).integers(0, len(reader), 50)
        rows = reader.read_rows(ids)
        assert rows.tokens.dtype == np.int64
        assert rows.sound.all()
        np.testing.assert_array_equal(rows.tokens, [reader.read(sample_id) for sample_id in ids.tolist()])
    assert reader.read_rows(np.array([], dtype=np.int64)).tokens.shape == (0, length + 1)
    with pytest.raises(IndexError):
        reader.read_rows(np.array([0, len(reader)]))


@pytest.mark.parametrize("length", [0, 5, 2 * SEQUENCE_LENGTH])
def test_other_lengths_are_refused(manifest: Manifest, length: int) -> None:
    with pytest.raises(UserError) as error:
        ShardReader(manifest, "train", length)
    assert str(error.value) == (
        f"sequence length {length} does not divide the 32 of the shards in {manifest.directory}: "
        f"choose a divisor, or build shards with --sequence-length {length}"
    )


def test_an_unknown_split_is_refused(manifest: Manifest) -> None:
    with pytest.raises(UserError) as error:
        ShardReader(manifest, "test", SEQUENCE_LENGTH)
    assert str(error.value) == (
        f"data set 'small' in {manifest.directory} has no split 'test'; it has ['train', 'validation']"
    )


@pytest.mark.parametrize("sample_id", [-1, 10**9])
def test_a_sample_that_is_not_there_is_an_index_error(manifest: Manifest, sample_id: int) -> None:
    with pytest.raises(IndexError):
        ShardReader(manifest, "train", SEQUENCE_LENGTH).read(sample_id)


def test_few_shards_stay_open(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_OPEN_SHARDS", 2)
    reader = ShardReader(manifest, "train", SEQUENCE_LENGTH)
    before = len(list(Path("/proc/self/fd").iterdir()))
    stored = stored_samples(manifest, "train")
    for sample_id in np.random.default_rng(0).permutation(len(reader))[:80]:
        np.testing.assert_array_equal(reader.read(int(sample_id)), stored[sample_id])
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4  # the tar's and the mapped index's


def test_large_vocabularies_are_stored_in_four_bytes(manifest: Manifest, tmp_path: Path) -> None:
    tokenizer = Tokenizer(manifest.tokenizer_file)
    tokenizer.vocab_size = 70_000
    writer = SplitWriter(tmp_path, "train", layout(), tokenizer)
    tokens = np.random.default_rng(0).integers(60_000, 70_000, 1000, dtype=np.int32)
    writer.add_document(tokens)
    writer.finish()
    split = dataclasses.replace(manifest.splits["train"], samples=writer.samples, shards=tuple(writer.shards))
    large = dataclasses.replace(manifest, folder=LocalFolder(tmp_path), dtype="<u4", splits={"train": split})
    reader = ShardReader(large, "train", SEQUENCE_LENGTH)
    read = np.concatenate([tokens[:1], *(reader.read(sample_id)[1:] for sample_id in range(len(reader)))])
    assert len(read) + writer.dropped_tokens == len(tokens)
    np.testing.assert_array_equal(read, tokens[: len(read)])
