"""Raw text as samples: order, packing, going on anywhere, and what cannot be gone on with."""

import itertools
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.cursor import Cursor
from pretrain.data.manifest import Manifest
from pretrain.data.progress import DataProgress
from pretrain.data.shard_bytes import Opener
from pretrain.data.stream import TextShards, endless
from pretrain.data.stream_batches import StreamBatches, read_held_out
from pretrain.data.tokenizer import Tokenizer
from pretrain.data.transfer import Patience
from pretrain.errors import UserError
from tests.pretrain.data import raw
from tests.pretrain.data.small import real_texts

LENGTH, MICRO_BATCH, GLOBAL_BATCH, SEED = 16, 1, 4, 7
SHARD_SIZES = (5, 1, 9, 3, 6)


@pytest.fixture(scope="module")
def tokenizer(manifest: Manifest) -> Tokenizer:
    assert manifest.tokenizer_file is not None
    return Tokenizer(manifest.tokenizer_file)


@pytest.fixture
def shards(tokenizer: Tokenizer, tmp_path: Path) -> TextShards:
    """Unequal shards of short texts; one document is broken."""
    texts = iter(text[:300] for text in real_texts(40))
    places = []
    for number, size in enumerate(SHARD_SIZES):
        members = [(f"{count}.txt", text.encode()) for count, text in enumerate(itertools.islice(texts, size))]
        if number == 2:
            members.insert(4, ("broken.json", b"{"))
        places.append(str(raw.write_plain(tmp_path / f"{number}.tar", members)))
    return text_shards(places, tokenizer)


def text_shards(places: Sequence[str], tokenizer: Tokenizer, said: list[str] | None = None) -> TextShards:
    report = said.append if said is not None else lambda line: None
    return TextShards(places, Opener(Patience(1)).open, tokenizer, "text", report)


def batches(
    shards: TextShards, dp_rank: int, dp_size: int, consumed: int = 0, start: Cursor | None = None
) -> StreamBatches:
    return StreamBatches(shards, SEED, LENGTH, MICRO_BATCH, GLOBAL_BATCH, dp_rank, dp_size, consumed, start or Cursor())


def steps(stream: StreamBatches, first: int, last: int) -> list[list[list[int]]]:
    return [
        stream.read(np.arange(GLOBAL_BATCH * n, GLOBAL_BATCH * (n + 1))).tokens.tolist() for n in range(first, last)
    ]


def text_of(path: str) -> list[str]:
    """Independent of webdataset and of what is tested."""
    with tarfile.open(path) as tar:
        files = [tar.extractfile(member) for member in tar.getmembers() if member.name.endswith(".txt")]
        return [file.read().decode() for file in files if file]


@pytest.mark.parametrize(("dp_rank", "dp_size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_samples_are_the_shards_texts_in_the_order_of_seed_and_epoch(
    shards: TextShards, tokenizer: Tokenizer, dp_rank: int, dp_size: int
) -> None:
    epochs = [shards.order(SEED, epoch, dp_rank, dp_size) for epoch in range(3)]
    texts = [text for epoch in epochs for place in epoch for text in text_of(place)]
    flat = np.concatenate(tokenizer.encode_documents(texts)).tolist()
    stream, slots = batches(shards, dp_rank, dp_size), GLOBAL_BATCH // dp_size
    count = (len(flat) - 1) // LENGTH // slots
    found = [row for rows in steps(stream, 0, count) for row in rows]
    assert found == [flat[n * LENGTH : (n + 1) * LENGTH + 1] for n in range(count * slots)]
    behind = stream.cursor_behind(count * GLOBAL_BATCH)
    assert behind is not None
    assert behind.epoch == 2


def test_an_epoch_deals_every_shard_once_and_differs_from_others(shards: TextShards) -> None:
    orders = []
    for epoch in range(4):
        dealt = [shards.order(SEED, epoch, dp_rank, 2) for dp_rank in range(2)]
        assert sorted(dealt[0] + dealt[1]) == sorted(shards.places)
        assert abs(len(dealt[0]) - len(dealt[1])) <= 1
        orders.append(dealt)
    assert orders[0] == [shards.order(SEED, 0, dp_rank, 2) for dp_rank in range(2)]
    assert len({str(order) for order in orders}) == 4
    assert shards.order(SEED + 1, 0, 0, 1) != shards.order(SEED, 0, 0, 1)


def test_it_goes_on_anywhere(shards: TextShards) -> None:
    """From every step's cursor, saved while later steps were read already, through the form that a checkpoint has."""
    count = 140
    whole = batches(shards, 1, 2)
    expected = steps(whole, 0, count)
    at = {}
    for step in range(count - 1):
        cursor = whole.cursor_behind(step * GLOBAL_BATCH)
        assert cursor is not None
        saved = DataProgress(stream=[Cursor(), cursor]).to_dict()
        at[step] = DataProgress.from_dict(saved).stream[1]
        assert Cursor(*cursor.numbers()) == cursor
    assert {cursor.epoch for cursor in at.values()} >= {0, 1, 2}
    assert any(cursor.token for cursor in at.values())
    for step, cursor in at.items():
        resumed = batches(shards, 1, 2, step * GLOBAL_BATCH, cursor)
        assert steps(resumed, step, step + 2) == expected[step : step + 2], cursor
        if step + 1 in at:
            assert resumed.cursor_behind((step + 1) * GLOBAL_BATCH) == at[step + 1]


def test_counts_of_what_arrived_was_dropped_and_lost(shards: TextShards, tokenizer: Tokenizer) -> None:
    """Over two epochs; a shard of ten documents, one of them broken, loses its last four in each."""
    said: list[str] = []
    place = Path(shards.places[2])
    header = raw.header_of(place, 6)
    raw.damage(place, header, b"\xff")
    documents = endless(text_shards(shards.places, tokenizer, said), SEED, 0, 1, Cursor())
    cursor = next(document.cursor for document in documents if document.cursor.epoch == 2)
    assert (cursor.shard, cursor.document, cursor.token) == (0, 0, 0)
    assert cursor.read == 2 * (sum(SHARD_SIZES) + 1 - 4)
    assert (cursor.dropped, cursor.lost) == (2, 2 * 4)
    assert said == [
        f"broken JSON: {place}, broken",
        f"shard {place} has no sound header at byte {header}: 6 documents arrived, 4 were lost",
    ]


@pytest.mark.parametrize("change", ["texts before", "the text itself", "fewer texts"])
def test_a_shard_that_has_changed_is_refused(shards: TextShards, change: str) -> None:
    stream, step, cursor = batches(shards, 0, 1), 0, Cursor()
    while not (cursor.document >= 2 and cursor.token):
        steps(stream, step, step + 1)
        step += 1
        cursor = stream.cursor_behind(step * GLOBAL_BATCH) or cursor
    place = Path(shards.order(SEED, cursor.epoch, 0, 1)[cursor.shard])
    texts = text_of(str(place))
    if change == "fewer texts":
        texts = texts[:2]
    else:
        texts[cursor.document if change == "the text itself" else 0] += "!"
    raw.write_plain(place, [(f"{number}.txt", text.encode()) for number, text in enumerate(texts)])
    with pytest.raises(UserError, match="is not what the checkpoint was trained on; restore it"):
        steps(batches(shards, 0, 1, step * GLOBAL_BATCH, cursor), step, step + 1)


def test_a_shard_without_text_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    place = str(raw.write_texts(tmp_path / "a.tar", ["one", "two"], "json"))
    shards = TextShards([place], Opener(Patience(1)).open, tokenizer, "body", lambda line: None)
    with pytest.raises(UserError, match=r"none of its 2 documents has text; .* with the field data.text_field=body"):
        steps(batches(shards, 0, 1), 0, 1)
    place = str(raw.write_plain(tmp_path / "b.tar", [("a.jpg", b"x")]))
    with pytest.raises(UserError, match=r"b.tar: it has no member .txt or .json"):
        steps(batches(text_shards([place], tokenizer), 0, 1), 0, 1)


def test_an_epoch_of_damage_ends(tokenizer: Tokenizer, tmp_path: Path) -> None:
    places = [str(raw.damage(raw.write_texts(tmp_path / f"{n}.tar", ["text"]), 0, b"\xff")) for n in range(2)]
    said: list[str] = []
    with pytest.raises(UserError, match="a whole epoch of shards gave no text; see the warnings above"):
        steps(batches(text_shards(places, tokenizer, said), 0, 1), 0, 1)
    assert len(said) == 2


def test_windows_cannot_be_skipped(shards: TextShards) -> None:
    stream = batches(shards, 0, 1)
    steps(stream, 0, 1)
    with pytest.raises(UserError, match=r"draws 8 to 11 do not follow 3: data.mode=stream cannot skip windows"):
        steps(stream, 2, 3)


@pytest.mark.parametrize("wanted", [1, 5, 6, 100_000])
def test_held_out_samples_are_those_of_one_rank_dealt_out(
    shards: TextShards, tokenizer: Tokenizer, wanted: int
) -> None:
    (alone,) = [read_held_out(shards, wanted, LENGTH, 2, 0, 1)]
    ranks = [read_held_out(shards, wanted, LENGTH, 2, dp_rank, 3) for dp_rank in range(3)]
    flat = np.concatenate(tokenizer.encode_documents([text for place in shards.places for text in text_of(place)]))
    count = min(wanted, (len(flat) - 1) // LENGTH)
    assert alone.sound.sum() == count
    assert alone.tokens[alone.sound].tolist() == [
        flat[n * LENGTH : (n + 1) * LENGTH + 1].tolist() for n in range(count)
    ]
    assert len({len(rows.sound) for rows in ranks}) == 1
    together = np.stack([rows.tokens.reshape(-1, 2, LENGTH + 1) for rows in ranks], axis=1).reshape(-1, LENGTH + 1)
    sound = np.stack([rows.sound.reshape(-1, 2) for rows in ranks], axis=1).ravel()
    assert together[sound].tolist() == alone.tokens[alone.sound].tolist()


def test_too_little_held_out_text_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    shards = text_shards([str(raw.write_texts(tmp_path / "a.tar", ["ab"]))], tokenizer)
    with pytest.raises(UserError, match=r"data.validation_urls hold fewer than the 17 tokens of one sample"):
        read_held_out(shards, 3, LENGTH, 1, 0, 1)
