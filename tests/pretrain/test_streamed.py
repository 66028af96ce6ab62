"""What a run asks of raw text before it starts, and what it refuses, in this process."""

from pathlib import Path

import pytest

from pretrain.config import Config
from pretrain.config_file import dump_config, load_config
from pretrain.data.cursor import Cursor
from pretrain.errors import UserError
from pretrain.state import TrainState
from pretrain.streamed import StreamedData
from tests.launch import REPOSITORY
from tests.pretrain.data import raw


@pytest.fixture
def settings(manifest: Path, tmp_path: Path) -> list[str]:
    """Four shards and a held-out one."""
    for name in ("train-0", "train-1", "train-2", "train-3", "validation"):
        raw.write_texts(tmp_path / f"{name}.tar", [f"some text of {name}"])
    return [
        f"data.urls={tmp_path}/train-{{0..3}}.tar",
        f"data.validation_urls=[{tmp_path}/validation.tar]",
        f"data.tokenizer={manifest.parent.parent / 'tokenizer.model'}",
    ]


def config(*overrides: str) -> Config:
    return load_config(REPOSITORY / "configs/stream_demo.yaml", list(overrides))


def test_the_first_line_says_what_is_not_promised(settings: list[str]) -> None:
    notice = StreamedData(config(*settings)).notice()
    assert notice.startswith("data.mode=stream reads 4 shards of raw text. It does not promise: every document once")
    assert "\n" not in notice


def test_facts(settings: list[str]) -> None:
    facts = StreamedData(config(*settings)).facts
    assert facts.token_counts is None
    assert facts.fingerprints == {"stream": facts.fingerprint}
    other = StreamedData(config(*settings, "data.text_field=body")).facts
    assert (other.vocab_size, other.eod_id, other.tokenizer_sha256) == (
        *(facts.vocab_size, facts.eod_id, facts.tokenizer_sha256),
    )
    assert other.fingerprint != facts.fingerprint


def test_a_run_begins_and_goes_on_with_as_many_ranks(settings: list[str]) -> None:
    data, state = StreamedData(config(*settings)), TrainState()
    data.go_on(config(*settings), state, None, {}, 2)
    assert state.data.stream == [Cursor(), Cursor()]
    record = {"data_fingerprint": data.facts.fingerprint}
    data.go_on(config(*settings), state, Path("step-3"), record, 2)
    with pytest.raises(UserError) as caught:
        data.go_on(config(*settings), state, Path("step-3"), record, 4)
    assert str(caught.value).startswith(
        "step-3 was saved by 2 data-parallel ranks, and these are 4: data.mode=stream goes on with as many"
    )
    state.data.skip(8, 4, 0)
    with pytest.raises(UserError, match=r"step-3 skips windows of samples, which data.mode=stream cannot"):
        data.go_on(config(*settings), state, Path("step-3"), record, 2)


def test_other_shards_are_refused_and_moved_ones_are_not(settings: list[str], tmp_path: Path) -> None:
    data, state = StreamedData(config(*settings)), TrainState()
    data.go_on(config(*settings), state, None, {}, 2)
    record = {"data_fingerprint": data.facts.fingerprint}
    fewer = config(*settings, f"data.urls={tmp_path}/train-{{0..2}}.tar")
    with pytest.raises(UserError, match=r"name the same shards or choose another run\.dir"):
        StreamedData(fewer).go_on(fewer, state, Path("step-3"), record, 2)
    (tmp_path / "moved").mkdir()
    for shard in tmp_path.glob("train-*.tar"):
        shard.rename(tmp_path / "moved" / shard.name)
    moved = config(*settings, f"data.urls={tmp_path}/moved/train-{{0..3}}.tar")
    StreamedData(moved).go_on(moved, state, Path("step-3"), record, 2)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.urls={folder}/train-{{0..4}}.tar", "shard {folder}/train-4.tar does not exist; see data.urls"),
        ("data.validation_urls={folder}/none.tar", "shard {folder}/none.tar does not exist; see data.urls and"),
        ("data.tokenizer={folder}/none.model", "tokenizer {folder}/none.model does not exist"),
        ("data.eod_id=0", "id 0 is no control symbol, so it cannot end documents"),
        ("model.vocab_size=100", "model.vocab_size=100 is smaller than the "),
    ],
)
def test_what_is_refused(settings: list[str], tmp_path: Path, override: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        StreamedData(config(*settings, override.format(folder=tmp_path)))
    assert line.format(folder=tmp_path) in str(caught.value)


def test_passwords_are_recorded_nowhere() -> None:
    written = dump_config(config("data.urls=http://user:secret@host/a-{0..3}.tar?sig=secret"))
    assert "http://***@host/a-{0..3}.tar?***" in written
    assert "secret" not in written
