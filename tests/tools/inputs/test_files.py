from pathlib import Path

import pytest

from pretrain.errors import UserError
from tools.inputs import Account, Fault, Reading, find_inputs, read_documents
from tools.inputs.formats import FORMATS
from tools.inputs.progress import progress_line


def names(*inputs: Path | str) -> list[str]:
    return [file.path.name for file in find_inputs(inputs)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.txt", "deep/c.tar", "deep/deeper/d.parquet", ".hidden/e.txt", "picture.png", ".f.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return tmp_path


def test_folders_and_patterns_give_files_in_a_fixed_order(folder: Path) -> None:
    assert names(folder) == ["a.txt", "b.jsonl", "c.tar", "d.parquet"]
    assert names(folder / "b.jsonl", folder / "a.txt") == ["b.jsonl", "a.txt"]
    assert names(f"{folder}/**/*.parquet", f"{folder}/*.txt") == ["d.parquet", "a.txt"]
    assert names(f"{folder}/deep*") == ["c.tar", "d.parquet"]
    odd = folder / "[odd].txt"
    odd.write_text("x")
    assert names(odd) == ["[odd].txt"]


def test_inputs_are_refused_before_any_work(folder: Path) -> None:
    known = ", ".join(FORMATS)
    (folder / "empty").mkdir()
    for inputs, message in (
        (["nowhere.txt"], "input nowhere.txt does not exist"),
        ([f"{folder}/*.csv"], f"input {folder}/*.csv matches nothing"),
        ([folder / "picture.png"], f"input {folder}/picture.png is none of the known types: {known}"),
        ([folder / "empty"], f"input folder {folder}/empty has no file of a known type: {known}"),
        (
            [folder, folder / "deep/../a.txt"],
            f"input {folder}/deep/../a.txt is named twice; its documents would be in the data twice",
        ),
    ):
        with pytest.raises(UserError) as error:
            find_inputs(inputs)
        assert str(error.value) == message


def test_links_to_folders_are_followed_once_and_links_to_nothing_refused(folder: Path) -> None:
    (folder / "deep" / "round").symlink_to(folder)
    (folder / "deep" / "again").symlink_to(folder / "deep" / "deeper")
    elsewhere = folder.parent / f"{folder.name}-elsewhere"
    elsewhere.mkdir()
    (elsewhere / "far.jsonl").write_text("x")
    (folder / "linked").symlink_to(elsewhere)
    assert sorted(names(folder)) == ["a.txt", "b.jsonl", "c.tar", "d.parquet", "far.jsonl"]
    (elsewhere / "far.jsonl").unlink()
    (folder / "lost.jsonl").symlink_to(elsewhere / "far.jsonl")
    with pytest.raises(UserError) as error:
        find_inputs([folder])
    assert str(error.value) == f"input {folder}/lost.jsonl is a link to nothing, or no file: remove or restore it"


def test_what_the_program_writes_is_no_input(folder: Path) -> None:
    files = find_inputs([folder, f"{folder}/*.jso*"], lambda path: path.name in ("b.jsonl", "c.tar"))
    assert [file.path.name for file in files] == ["a.txt", "d.parquet"]


def test_a_file_that_goes_away_is_counted(folder: Path) -> None:
    files = find_inputs([folder / "a.txt", folder / "b.jsonl"])
    (folder / "a.txt").unlink()
    account = Account()
    assert list(read_documents(files, Reading(), account)) == []
    assert account.listed == [
        f"{folder}/a.txt: unreadable (No such file or directory)",
        f"{folder}/b.jsonl:1: broken JSON",
    ]


def test_few_faults_are_shown_more_are_listed_and_all_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("x\n" * 1500)
    account = Account()
    assert list(read_documents(find_inputs([path]), Reading(), account)) == []
    account.report(tmp_path / "dropped.txt")
    assert len((tmp_path / "dropped.txt").read_text().splitlines()) == 1000
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 10
    assert captured.out.splitlines() == [
        "1500 records read: 0 documents, 1500 dropped as broken JSON",
        f"the dropped are listed in {tmp_path}/dropped.txt, but for 500 more",
    ]


def test_names_that_are_not_utf8_are_listed(tmp_path: Path) -> None:
    account = Account()
    account.drop(Fault("a\udcff.tar:b.txt", "empty"))
    account.report(tmp_path / "dropped.txt")
    assert (tmp_path / "dropped.txt").read_text() == "a\\udcff.tar:b.txt: empty\n"


def test_the_line_of_progress() -> None:
    line = progress_line("building", 1234, 50_000_000, 10, 30_000_000, 90_000_000)
    assert line == "building: 1234 documents, 5.0 MB/s, 25 %, 0 min 30 s left"
    line = progress_line("building", 1, 1, 100, 1, 99)
    assert line == "building: 1 documents, 0.0 MB/s, 1 %, 2 h 45 min left"
    assert progress_line("reading", 0, 0, 0, 0, 10) == "reading: 0 documents, 0.0 MB/s, 0 %"
