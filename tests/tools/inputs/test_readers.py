"""Every type of input, sound and damaged: each fault with its kind and place, and no record without a count."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from pretrain.errors import UserError
from tools.inputs import Account, Reading, find_inputs, read_documents
from tools.inputs import readers as readers_module

TEXTS = ["one", "two\r\nlines \u2028 😀", "  three\n\n"]


def read(path: Path, account: Account | None = None, **reading: object) -> tuple[list[str], list[str]]:
    """The texts of a file, and its faults without the file's name."""
    account = account or Account()
    texts = [document.text for document in read_documents(find_inputs([path]), Reading(**reading), account)]
    assert account.records == len(texts) + account.dropped.total()
    assert account.documents == len(texts)
    assert account.text_bytes == sum(len(text.encode()) for text in texts)
    return texts, [line.removeprefix(str(path)) for line in account.listed]


def lines_of(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def tar_of(members: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def parquet_of(column: list[object], kind: pyarrow.DataType | None = None, name: str = "text") -> bytes:
    content = io.BytesIO()
    table = pyarrow.table({"id": list(range(len(column))), name: pyarrow.array(column, kind)})
    pyarrow.parquet.write_table(table, content, row_group_size=2)
    return content.getvalue()


def two_frames(content: bytes) -> bytes:
    compress = zstandard.ZstdCompressor().compress
    return compress(content[:10]) + compress(content[10:])


SOUND: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: lines_of(TEXTS),
    "bom.jsonl": lambda: b"\xef\xbb\xbf" + lines_of(TEXTS),
    "no-end.jsonl": lambda: lines_of(TEXTS)[:-1],
    "a.jsonl.gz": lambda: gzip.compress(lines_of(TEXTS)),
    "members.json.gz": lambda: gzip.compress(lines_of(TEXTS[:1])) + gzip.compress(lines_of(TEXTS[1:])),
    "a.jsonl.zst": lambda: zstandard.ZstdCompressor().compress(lines_of(TEXTS)),
    "frames.jsonl.zst": lambda: two_frames(lines_of(TEXTS)),
    "a.parquet": lambda: parquet_of(TEXTS),
    "large.parquet": lambda: parquet_of(TEXTS, pyarrow.large_string()),
    "dictionary.parquet": lambda: parquet_of(TEXTS, pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
    "bytes.PARQUET": lambda: parquet_of([text.encode() for text in TEXTS], pyarrow.binary()),
    "txt.tar": lambda: tar_of({f"{number}.txt": text.encode() for number, text in enumerate(TEXTS)}),
    "json.tar": lambda: tar_of({f"d/{n}.json": json.dumps({"text": text}).encode() for n, text in enumerate(TEXTS)}),
}


@pytest.mark.parametrize("name", SOUND)
def test_every_type_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(SOUND[name]())
    assert read(path) == (TEXTS, [])


def test_the_field_of_the_text_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "one", "text": "other"}\n')
    (tmp_path / "a.parquet").write_bytes(parquet_of(["one"], name="content"))
    (tmp_path / "a.tar").write_bytes(tar_of({"a.json": b'{"content": "one"}'}))
    for name in ("a.jsonl", "a.parquet", "a.tar"):
        assert read(tmp_path / name, text_key="content") == (["one"], [])


def test_a_text_file_is_one_document_or_one_a_line(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfone\r\ntwo\r\n\n three"
    for path, stored in ((tmp_path / "a.txt", content), (tmp_path / "a.txt.gz", gzip.compress(content))):
        path.write_bytes(stored)
        assert read(path) == ([content.decode()], [])
        assert read(path, lines=True) == (["\ufeffone\r", "two\r", " three"], [":3: empty"])


def test_bad_lines_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.jsonl"
    lines = {
        b'{"text": "one", "more": 1}': None,
        b"": "empty",
        b'{"text": "cut off': "broken JSON",
        b'{"other": "x"}': "no field 'text'",
        b'["text"]': "no field 'text'",
        b'{"text": null}': "text is no string",
        b'{"text": " \\n"}': "empty",
        b'{"text": "gr\xf6sser"}': "not UTF-8",
        b'{"text": "half \\ud83d"}': "not Unicode (half of a surrogate pair)",
        b"[" * 100_000: "broken JSON",
        b'{"text": "' + b"x" * 200_001 + b'"}': "too long",
        b'{"text": "x", "other": "' + b"y" * 2_000_000 + b'"}': "too long",
        b'{"text": "a\\u2028b \\ud83d\\ude00"}': None,
        b'{"text": "no newline at the end"}': None,
    }
    path.write_bytes(b"\n".join(lines))
    account = Account()
    texts, faults = read(path, account, max_document_bytes=200_000)
    assert texts == ["one", "a\u2028b \U0001f600", "no newline at the end"]
    expected = [f":{number}: {kind}" for number, kind in enumerate(lines.values(), start=1) if kind]
    assert faults == expected
    assert capsys.readouterr().err.splitlines() == [f"dropped {path}{line}" for line in expected[:10]]
    account.report(tmp_path / "dropped.txt")
    out = capsys.readouterr().out
    assert out.startswith("14 records read: 3 documents, 2 dropped as broken JSON, 2 dropped as empty, ")
    assert (tmp_path / "dropped.txt").read_text().splitlines() == [f"{path}{line}" for line in expected]


def test_strict_stops_at_the_first_fault(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "one"}\nx\ny\n')
    with pytest.raises(UserError) as error:
        read(path, Account(strict=True))
    assert str(error.value) == f"{path}:2: broken JSON (--strict stops at the first bad input)"


def test_a_document_of_50_mb_is_kept_unless_the_limit_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.writelines(lines_of([text]) for text in ("before", "ab " * 17_000_000, "after"))
    texts, faults = read(path)
    assert ([len(text) for text in texts], faults) == ([6, 51_000_000, 5], [])
    texts, faults = read(path, max_document_bytes=1_000_000)
    assert (texts, faults) == (["before", "after"], [":2: too long"])


@pytest.mark.parametrize(("name", "kind"), [("a.jsonl.gz", "gzip"), ("a.jsonl.zst", "zstandard")])
def test_compressed_files_give_what_is_sound_and_tell_of_the_rest(tmp_path: Path, name: str, kind: str) -> None:
    texts = [f"{number} {hash(str(number))} {number**7}" for number in range(20_000)]
    content = lines_of(texts)
    whole = gzip.compress(content) if kind == "gzip" else zstandard.ZstdCompressor().compress(content)
    path = tmp_path / name
    for broken in (whole[: len(whole) // 2], whole[:-2], whole + b"x" * 100):
        path.write_bytes(broken)
        found, faults = read(path)
        assert found == texts[: len(found)]
        assert faults == [f":{len(found) + 1}: damaged or cut off ({kind})"]
    assert len(found) == len(texts)
    path.write_bytes(b"no such thing")
    assert read(path) == ([], [f":1: damaged or cut off ({kind})"])
    path.write_bytes(b"")
    assert read(path) == ([], [": empty"])


def test_a_damaged_text_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one two three")[:-4])
    assert read(path) == ([], [": damaged or cut off (gzip)"])
    plain = tmp_path / "a.txt"
    plain.write_bytes(b"\xff")
    assert read(plain) == ([], [": not UTF-8"])
    plain.write_bytes(b"12345")
    assert read(plain, max_document_bytes=4) == ([], [": too long"])


def test_faults_in_a_tar_are_named_by_member(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    members = {
        "d/a.txt": b"one",
        "d/a.json": b'{"text": "not this"}',
        "d/b.jpg": b"picture",
        "d/b.cls": b"1",
        "d/c.json": b"{}",
        "d/d.jpg": b"picture",
        "d/d.json": b'{"text": "two"}',
        "d/e.txt": b"\xff",
        "e/e.txt": b" ",
        "e/f.tokens.npy": b"x",
        "e/g.txt": b"x" * 100,
        "e/h.txt": b"three",
    }
    path.write_bytes(tar_of(members))
    assert read(path, max_document_bytes=99) == (
        ["one", "two", "three"],
        [
            ":d/b: no .txt or .json member",
            ":d/c.json: no field 'text'",
            ":d/e.txt: not UTF-8",
            ":e/e.txt: empty",
            ":e/f: no .txt or .json member",
            ":e/g.txt: too long",
        ],
    )


def test_a_damaged_tar_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    whole = tar_of({f"{number}.txt": b"text %d" % number for number in range(5)})
    for damaged, found, where in (
        (whole[:1024] + b"\1" + whole[1025:], 1, ": byte 1024"),  # a flipped byte in a header
        (whole[: 2 * 1024], 2, ": byte 2048"),  # cut between members
        (whole[: 2 * 1024 + 200], 2, ": byte 2048"),  # cut in a header
        (whole[: 2 * 1024 + 514], 2, ":2"),  # cut in a member
    ):
        path.write_bytes(damaged)
        texts, faults = read(path)
        assert texts[:found] == [f"text {number}" for number in range(found)]
        assert faults == [f"{where}: damaged or cut off (tar)"]
    path.write_bytes(b"no tar" * 1000)
    assert read(path) == ([], [": damaged or cut off (tar)"])


def test_a_long_tar_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of({f"{number}.txt": b"x" for number in range(50)}))
    held: list[int] = []
    member_of = readers_module._read_member

    def watch(*arguments: object) -> object:
        held.append(len(arguments[1].members))  # type: ignore[attr-defined]
        return member_of(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(readers_module, "_read_member", watch)
    assert len(read(path)[0]) == 50
    assert held == [0] * 50


def test_faults_in_parquet_are_named_by_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet_of(["one", None, " ", "x" * 100, "two"]))
    assert read(path, max_document_bytes=99) == (
        ["one", "two"],
        [":row 2: text is no string", ":row 3: empty", ":row 4: too long"],
    )
    path.write_bytes(parquet_of([b"one", b"\xff"], pyarrow.binary()))
    assert read(path) == (["one"], [":row 2: not UTF-8"])
    path.write_bytes(parquet_of([1, 2]))
    assert read(path) == ([], [":row 1: text is no string", ":row 2: text is no string"])
    assert read(path, text_key="x") == ([], [":row 1: no field 'x'", ":row 2: no field 'x'"])


def test_damaged_parquet_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    whole = parquet_of([f"{number} text" for number in range(9)])
    for damaged in (whole[:-50], b"PAR1", b"no parquet at all"):
        path.write_bytes(damaged)
        assert read(path) == ([], [":row 1: damaged or cut off (parquet)"])
    path.write_bytes(whole[:300] + bytes(300) + whole[600:])
    texts, faults = read(path)
    assert texts == [f"{number} text" for number in range(len(texts))]
    assert faults == [f":row {len(texts) + 1}: damaged or cut off (parquet)"]
