import json
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from pretrain.errors import UserError
from tools.corpus import main


def documents(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (out / "documents.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_embedded_corpus_is_the_topics_and_the_standard_library(tmp_path: Path) -> None:
    main(["--out", str(tmp_path)])
    written = documents(tmp_path)
    names = [document["source"] for document in written]
    assert [document["text"] for document in written[: len(topics)]] == [topics[name] for name in sorted(topics)]
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= set(names)
    assert len(set(names)) == len(names)
    parts = {part for name in names[len(topics) :] for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "topics.py"}
    listing = tmp_path / "documents.dropped.txt"
    skipped = listing.read_text().splitlines() if listing.exists() else []
    assert all(line.endswith(": empty") for line in skipped)


def test_the_embedded_corpus_is_the_same_every_time_up_to_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out in ("first", "second"):
        main(["--out", str(tmp_path / out), "--max-bytes", "700000"])
    first, second = (tmp_path / out / "documents.jsonl" for out in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    written = documents(tmp_path / "first")
    size = sum(len(document["text"].encode()) for document in written)
    assert 500_000 < size <= 700_000
    out = capsys.readouterr().out.splitlines()
    main(["--out", str(tmp_path / "whole")])
    whole = documents(tmp_path / "whole")
    assert written == whole[: len(written)]
    assert size + len(whole[len(written)]["text"].encode()) > 700_000
    assert out[-2] == f"left out {len(whole) - len(written)} documents beyond --max-bytes 700000"
    assert out[-1] == f"{second}: {len(written)} documents, {size / 1e6:.2f} MB"


def test_own_text_is_read_and_what_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    (text / "b").mkdir(parents=True)
    (text / ".git").mkdir()
    (text / ".git" / "config.txt").write_text("hidden")
    (text / "b" / "two.md").write_bytes("zwei\r\nZeilen, größer\n".encode())
    (text / "a.txt").write_text("one")
    (text / "blank.rst").write_text(" \n")
    (text / "latin.txt").write_bytes("größer".encode("latin-1"))
    (text / "picture.png").write_bytes(b"\x89PNG")
    (text / "broken.txt").symlink_to(text / "nowhere.txt")
    (text / "lines.jsonl").write_text('{"text": "three"}\n{"text": 3}\n')
    named = tmp_path / "README"
    named.write_text("four")
    out = tmp_path / "out"
    main(["--out", str(out), "--text", str(text), str(named)])
    assert documents(out) == [
        {"text": "one", "source": f"{text}/a.txt"},
        {"text": "three", "source": f"{text}/lines.jsonl:1"},
        {"text": "zwei\r\nZeilen, größer\n", "source": f"{text}/b/two.md"},
        {"text": "four", "source": str(named)},
    ]
    faults = [
        f"{text}/blank.rst: empty",
        f"{text}/broken.txt: no regular file",
        f"{text}/latin.txt: not UTF-8",
        f"{text}/lines.jsonl:2: text is no string",
        f"{text}/picture.png: not a text file type",
    ]
    listing = out / "documents.dropped.txt"
    assert listing.read_text().splitlines() == faults
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"dropped {fault}" for fault in faults]
    assert captured.out.splitlines() == [
        "9 records read: 4 documents, 1 dropped as empty, 1 dropped as no regular file, 1 dropped as not UTF-8, "
        "1 dropped as not a text file type, 1 dropped as text is no string",
        f"the dropped are listed in {listing}",
        f"{out / 'documents.jsonl'}: 4 documents, 0.00 MB",
    ]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_book_becomes_many_documents_of_whole_paragraphs(tmp_path: Path, newline: str) -> None:
    paragraphs = [f"paragraph {number} " * (number % 7 + 1) + "\n" * (2 + number % 3) for number in range(200)]
    book = "\n\n" + "".join(paragraphs) + "x" * 1000 + "\n\nend"
    file = tmp_path / "book.txt"
    book = book.replace("\n", newline)
    file.write_bytes(book.encode())
    main(["--out", str(tmp_path / "out"), "--text", str(file), "--max-document-bytes", "500"])
    written = documents(tmp_path / "out")
    texts = [document["text"] for document in written]
    assert "".join(texts) == book
    assert [document["source"] for document in written] == [f"{file}#{n + 1}" for n in range(len(written))]
    assert all(text.endswith(2 * newline) and text[0] not in newline for text in texts[1:-1])
    assert [len(text) > 500 for text in texts].count(True) == 1
    assert all(len(before) + len(after) > 500 for before, after in pairwise(texts[:-1]))
    main(["--out", str(tmp_path / "whole"), "--text", str(file), "--max-document-bytes", "1000000"])
    assert documents(tmp_path / "whole") == [{"text": book, "source": str(file)}]


def test_an_old_listing_of_skipped_files_goes_away(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one")
    listing = tmp_path / "documents.dropped.txt"
    listing.write_text("old")
    main(["--out", str(tmp_path), "--text", str(text)])
    assert not listing.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "{tmp}/out", "--text", "{tmp}/nowhere"], "text {tmp}/nowhere does not exist"),
        (
            ["--out", "{tmp}/folder/out", "--text", "{tmp}/folder"],
            "output folder {tmp}/folder/out lies inside the text folder {tmp}/folder: choose one outside",
        ),
        (["--out", "{tmp}/file", "--text", "{tmp}/file"], "output folder {tmp}/file cannot be made: File exists"),
        (
            ["--out", "{tmp}/out", "--text", "{tmp}/folder"],
            "no document to write: name files or folders with text by --text",
        ),
        (
            ["--out", "{tmp}/out", "--text", "{tmp}/file", "--max-bytes", "3"],
            "no document to write: raise --max-bytes above 3",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("text")
    with pytest.raises(UserError) as error:
        main([argument.format(tmp=tmp_path) for argument in arguments])
    assert str(error.value) == message.format(tmp=tmp_path)
    assert not list((tmp_path).glob("out/documents.jsonl*"))
