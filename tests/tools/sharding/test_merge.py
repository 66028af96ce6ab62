from collections import Counter
from pathlib import Path

import pytest

from pretrain.data.manifest import Manifest, load_manifest
from pretrain.data.reader import ShardReader
from pretrain.errors import UserError
from tests.pretrain.data.small import SEQUENCE_LENGTH, layout, real_texts, write_documents
from tools.shard_writer import ShardLayout
from tools.sharding.build import Building, build
from tools.shards import main


def another(manifest: Manifest, folder: Path, shards: ShardLayout | None = None) -> Manifest:
    """A data set of other documents under the same name."""
    folder.mkdir()
    documents = write_documents(folder / "documents.jsonl", [*real_texts(40)[24:], ""])
    assert manifest.tokenizer_file is not None
    return build(
        Building(
            inputs=[documents],
            tokenizer=manifest.tokenizer_file,
            out=folder / "shards",
            layout=shards or layout(),
            validation_fraction=0.2,
        )
    )


def samples(manifest: Manifest, split: str) -> list[tuple[int, ...]]:
    reader = ShardReader(manifest, split, SEQUENCE_LENGTH)
    return [tuple(reader.read(number).tolist()) for number in range(len(reader))]


@pytest.mark.parametrize("how", [[], ["--copy"]])
def test_a_merged_data_set_has_every_sample_of_both_once(
    manifest: Manifest, tmp_path: Path, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    other = another(manifest, tmp_path / "other")
    out = tmp_path / "merged"
    main(["merge", str(manifest.directory), str(other.directory), "--out", str(out), "--name", "both", *how])
    merged = load_manifest(out)
    for split in ("train", "validation"):
        assert samples(merged, split) == samples(manifest, split) + samples(other, split)
        parts = manifest.splits[split], other.splits[split]
        assert merged.splits[split].tokens == sum(part.tokens for part in parts)
        assert merged.splits[split].documents == sum(part.documents for part in parts)
    counts = Counter(token for sample in samples(merged, "train") for token in sample[1:])
    assert merged.token_counts.tolist() == [counts[token] for token in range(merged.vocab_size)]
    assert merged.statistics is not None
    assert (merged.statistics.records, merged.statistics.dropped) == (28 + 17, {"empty": 1})
    assert len({shard.file for split in merged.splits.values() for shard in split.shards}) == sum(
        len(part.splits[split].shards) for part in (manifest, other) for split in part.splits
    )
    first, source = out / "both-train-000000.tar", manifest.directory / "small-train-000000.tar"
    if not how:
        source = other.directory / "small-train-000000.tar"
        first = out / f"both-train-{len(manifest.splits['train'].shards):06d}.tar"
    assert first.samefile(source) == (not how)
    capsys.readouterr()
    main(["verify", str(out)])
    assert capsys.readouterr().out.startswith(f"{out} is sound: ")


def test_what_does_not_fit_is_not_merged(manifest: Manifest, tmp_path: Path) -> None:
    longer = another(
        manifest,
        tmp_path / "longer",
        ShardLayout(name="small", sequence_length=16, samples_per_member=8, members_per_shard=6),
    )
    here, merged = str(manifest.directory), tmp_path / "merged"
    main(["merge", here, "--out", str(merged), "--name", "other"])
    for arguments, message in (
        (
            [here, str(longer.directory), "--out", str(tmp_path / "out")],
            f"{longer.directory} has sequence_length 16, {here} 32: only data sets of one tokenizer and length can be "
            "merged",
        ),
        (
            [here, here, "--out", str(tmp_path / "out")],
            f"{here} is given twice; its samples would be in the data twice",
        ),
        (
            [here, str(merged), "--out", str(tmp_path / "out")],
            f"{merged} and {here} both hold the content of other-train-000000.tar; its samples would be in the data "
            "twice",
        ),
        ([here, "--out", here], f"{here}/manifest.json exists: choose another --out"),
    ):
        with pytest.raises(UserError) as error:
            main(["merge", *arguments])
        assert str(error.value) == message


def test_inspect_shows_what_is_in_a_data_set(manifest: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", str(manifest.directory), "--samples", "1"])
    out = capsys.readouterr().out
    assert out.startswith("small: sequence length 32, vocabulary 600, end of document 1, stored as <u2, tokenizer ")
    assert "28 records read: 28 documents, 0 duplicates\n" in out
    assert "== train sample 0: 33 tokens, " in out
    assert "== validation sample 0: 33 tokens, " in out
