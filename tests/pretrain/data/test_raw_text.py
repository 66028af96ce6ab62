"""What webdataset gives of a tar of raw text, and whether what it lost is counted."""

import gzip
import os
import pickle
import tarfile
from pathlib import Path

import pytest

from pretrain.data.raw_text import Arrival, Losses, arrivals, losses
from pretrain.data.shard_bytes import Opener, ShardBytes
from pretrain.data.transfer import Patience
from pretrain.errors import UserError
from tests.pretrain.data import raw

TEXTS = [f"text {number}, " + "words " * (60 * number) for number in range(8)]


def read(path: Path, field: str = "text") -> tuple[list[Arrival], Losses]:
    with Opener(Patience(1)).open(str(path)) as shard:
        found = list(arrivals(shard, field))
    return found, losses(shard.census, "SHARD", len(found))


def texts(path: Path) -> list[str | None]:
    return [arrival.text for arrival in read(path)[0]]


def plain(path: Path) -> Path:
    return raw.write_plain(path, [(f"{number}.txt", text.encode()) for number, text in enumerate(TEXTS)])


@pytest.mark.parametrize("suffix", ["txt", "json"])
def test_a_sound_tar_gives_all(tmp_path: Path, suffix: str) -> None:
    path = raw.write_texts(tmp_path / "a.tar", TEXTS, suffix)
    assert texts(path) == TEXTS
    assert read(path)[1] == Losses(0, 0, "")


@pytest.mark.parametrize("short", [True, False], ids=["plain headers", "extended headers"])
@pytest.mark.parametrize("kind", ["flipped", "zeroed"])
@pytest.mark.parametrize("member", [0, 3, 7])
def test_a_damaged_header(tmp_path: Path, short: bool, kind: str, member: int) -> None:
    """webdataset gives what lies before, without a word; the rest is counted, the damaged one included."""
    path = plain(tmp_path / "a.tar") if short else raw.write_texts(tmp_path / "a.tar", TEXTS)
    place = raw.header_of(path, member)
    raw.damage(path, place + (20 if kind == "flipped" else 0), b"\xff" if kind == "flipped" else bytes(raw.BLOCK))
    found, missed = read(path)
    assert [arrival.text for arrival in found] == TEXTS[:member]
    assert missed.lost == 8 - member
    assert missed.line.startswith(f"shard SHARD has no sound header at byte {place}: {member} documents arrived, ")
    assert missed.line.endswith(f"{8 - member} were lost")


def test_a_damaged_extended_header_costs_the_file_that_it_belongs_to(tmp_path: Path) -> None:
    path = raw.write_texts(tmp_path / "a.tar", TEXTS)
    before = raw.header_of(path, 3) - 2 * raw.BLOCK
    assert path.read_bytes()[before + 156 : before + 157] == b"x"
    raw.damage(path, before + 20, b"\xff")
    found, missed = read(path)
    assert (len(found), missed.lost) == (3, 5)


def test_two_damaged_places(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.tar")
    for place in [raw.header_of(path, member) for member in (2, 5)]:
        raw.damage(path, place, b"\xff")
    found, missed = read(path)
    assert (len(found), missed.lost) == (2, 6)


def test_a_whole_member_of_zeros(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.tar")
    place = raw.header_of(path, 3)
    raw.damage(path, place, bytes(raw.header_of(path, 4) - place))
    found, missed = read(path)
    assert (len(found), missed.lost) == (3, 5)


@pytest.mark.parametrize(
    ("where", "arrive", "lost"),
    [("in a text", 5, 1), ("in a header", 5, 0), ("behind a header", 5, 1), ("between members", 5, 0)],
)
def test_a_tar_that_is_cut_off(tmp_path: Path, where: str, arrive: int, lost: int) -> None:
    """What the missing end held nobody can know; the line says so."""
    path = plain(tmp_path / "a.tar")
    header = raw.header_of(path, 5)
    place = {"in a text": 600, "in a header": 100, "behind a header": 512, "between members": 0}[where]
    found, missed = read(raw.cut(path, header + place))
    assert (len(found), missed.lost) == (arrive, lost)
    assert missed.line == (
        f"shard SHARD is cut off, and what is missing cannot be counted: {arrive} documents arrived, {lost} were lost"
    )


def test_tars_one_behind_the_other(tmp_path: Path) -> None:
    """webdataset stops at the first one's end."""
    first, second = (raw.write_texts(tmp_path / f"{name}.tar", TEXTS[:3]) for name in "ab")
    first.write_bytes(first.read_bytes() + second.read_bytes())
    _, missed = read(first)
    assert missed == Losses(
        3, 0, "shard SHARD has more behind its end mark, where webdataset stops: 3 documents arrived, 3 were lost"
    )


def test_an_empty_tar_and_an_empty_file(tmp_path: Path) -> None:
    assert read(raw.write_texts(tmp_path / "a.tar", [])) == ([], Losses(0, 0, ""))
    (tmp_path / "b.tar").touch()
    assert "is cut off" in read(tmp_path / "b.tar")[1].line


def test_samples_of_several_members(tmp_path: Path) -> None:
    """The text is preferred; a damaged header is not counted twice over the sample's other member."""
    samples = [{"json": {"url": number}, "txt": text} for number, text in enumerate(TEXTS)]
    path = raw.write_tar(tmp_path / "a.tar", samples)
    assert texts(path) == TEXTS
    raw.damage(path, raw.header_of(path, 2 * 3) + 20, b"\xff")
    found, missed = read(path)
    assert (len(found), missed.lost) == (3, 5)


def test_a_name_that_comes_again(tmp_path: Path) -> None:
    """webdataset refuses a sample's second member of a name, and would drop it without a word."""
    path = raw.write_plain(tmp_path / "a.tar", [("a.txt", b"one"), ("a.txt", b"two"), ("b.txt", b"three")])
    found, missed = read(path)
    assert [arrival.text for arrival in found] == ["one", "three"]
    assert missed.lost == 1
    assert "repeats names of members" in missed.line


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_other_members(tmp_path: Path, form: int) -> None:
    names = ["folder/", *("folder/" * 30 + f"document{number}.txt" for number in range(3))]
    names += ["__meta__", "picture.jpg", "nothing"]
    path = raw.write_plain(tmp_path / "a.tar", [(name, b"text") for name in names], form)
    found, missed = read(path)
    assert [arrival.name for arrival in found] == [name.removesuffix(".txt") for name in names[1:4]]
    assert missed == Losses(0, 2, "")


def test_what_holds_no_text_is_named(tmp_path: Path) -> None:
    members = [
        *(("a.txt", b"\xff\xfe"), ("b.txt", b" \n"), ("c.txt", bytes(100)), ("d.json", b"{")),
        *(("e.json", b'{"content": "x"}'), ("f.json", b'{"text": 1}'), ("g.json", b'{"text": "\\ud800"}')),
        ("h.txt", b"good"),
    ]
    found, missed = read(raw.write_plain(tmp_path / "a.tar", members))
    assert [(arrival.name, arrival.fault) for arrival in found if arrival.text is None] == [
        *(("a", "not UTF-8"), ("b", "empty"), ("c", "empty"), ("d", "broken JSON"), ("e", "no field 'text'")),
        *(("f", "text is no string"), ("g", "not Unicode (half of a surrogate pair)")),
    ]
    assert missed == Losses(0, 0, "")
    assert read(tmp_path / "a.tar", "content")[0][4].text == "x"


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch TRAPPED",)


def test_no_member_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trap = pickle.dumps(Trap())
    path = raw.write_plain(tmp_path / "a.tar", [("a.pkl", trap), ("a.txt", b"good"), ("b.txt", trap)])
    assert [arrival.text for arrival in read(path)[0]][:1] == ["good"]
    assert not (tmp_path / "TRAPPED").exists()


def test_a_disk_that_fails_is_told_in_one_line(tmp_path: Path) -> None:
    """Not taken for the end of the shard, as webdataset would."""
    path = raw.write_texts(tmp_path / "a.tar", TEXTS)

    class Broken:
        left = 3

        def read(self, size: int, /) -> bytes:
            self.left -= 1
            if self.left < 0:
                raise OSError(5, "Input/output error")
            return path.read_bytes()[:size]

        def close(self) -> None:
            pass

    with pytest.raises(UserError) as caught:
        list(arrivals(ShardBytes(Broken(), "SHARD"), "text"))
    assert str(caught.value) == "shard SHARD cannot be read: Input/output error"


def test_a_compressed_tar_is_refused(tmp_path: Path) -> None:
    path = raw.write_texts(tmp_path / "a.tar", TEXTS)
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(UserError, match=r"is compressed \(gzip\); data.mode=stream reads plain tars, unpack it"):
        read(path)
