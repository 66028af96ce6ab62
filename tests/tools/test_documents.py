from pathlib import Path

import numpy as np
import pytest

from pretrain.errors import UserError
from tools.documents import Skipped, check_inputs, hash_fraction, is_validation, read_documents


def test_bad_lines_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.jsonl"
    lines = [
        b'{"text": "one", "more": 1}',
        b"",
        b'{"text": "cut off',
        b'{"other": "x"}',
        b'["text"]',
        b'{"text": null}',
        b'{"text": " \\n"}',
        b'{"text": "gr\xf6sser"}',
        b'{"text": "half \\ud83d"}',
        b"[" * 100_000,
        b'{"text": "a\\u2028b \\ud83d\\ude00"}',
        b'{"text": "no newline at the end"}',
    ]
    path.write_bytes(b"\n".join(lines))
    skipped = Skipped(tmp_path / "skipped.txt")
    read = list(read_documents([path], skipped))
    assert [document.text for document in read] == ["one", "a\u2028b \U0001f600", "no newline at the end"]
    assert [document.source for document in read] == [f"{path}:{number}" for number in (1, 11, 12)]
    skipped.report()
    faults = {
        2: "empty line",
        3: "broken JSON",
        4: "no text field",
        5: "no text field",
        6: "text is no string",
        7: "empty text",
        8: "not UTF-8",
        9: "not Unicode (half of a surrogate pair)",
        10: "broken JSON",
    }
    expected = [f"{path}:{number}: {fault}" for number, fault in faults.items()]
    assert (tmp_path / "skipped.txt").read_text().splitlines() == expected
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"skipped {line}" for line in expected]
    assert captured.out.startswith("skipped 9: 2 broken JSON, 1 empty line, ")


def test_few_faults_are_shown_and_all_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("x\n" * 1000)
    skipped = Skipped(tmp_path / "skipped.txt")
    assert list(read_documents([path], skipped)) == []
    skipped.report()
    assert len((tmp_path / "skipped.txt").read_text().splitlines()) == 1000
    assert len(capsys.readouterr().err.splitlines()) == 10


def test_a_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r")
    (document,) = read_documents([path], Skipped(tmp_path / "skipped.txt"))
    assert document.text.encode() == path.read_bytes()


def test_inputs_are_checked_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError) as absent:
        check_inputs([tmp_path / "nowhere.txt"])
    assert str(absent.value) == f"input {tmp_path}/nowhere.txt does not exist"
    other = tmp_path / "a.csv"
    other.write_text("x")
    for path in (other, tmp_path):
        with pytest.raises(UserError) as error:
            check_inputs([path])
        assert str(error.value) == (
            f"input {path} is neither a .jsonl nor a .txt file; tools.corpus makes one of other sources"
        )


def test_the_text_alone_deals_documents_evenly() -> None:
    fractions = np.array([hash_fraction(str(number), "validation") for number in range(4000)])
    assert np.all((fractions >= 0) & (fractions < 1))
    histogram = np.histogram(fractions, bins=10, range=(0, 1))[0]
    assert np.all(np.abs(histogram - 400) < 100)
    others = np.array([hash_fraction(str(number), "sample") for number in range(4000)])
    assert abs(np.corrcoef(fractions, others)[0, 1]) < 0.1
    assert is_validation("7", fractions[7] + 1e-9)
    assert not is_validation("7", fractions[7])
