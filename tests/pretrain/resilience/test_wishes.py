from pathlib import Path

import pytest

from pretrain.resilience import wishes
from pretrain.resilience.wishes import Stop, Wishes, WishFiles


@pytest.fixture(autouse=True)
def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wishes, "LOOK_EVERY_SECONDS", 0.0)


def test_of_several_wishes_the_strongest_count() -> None:
    agreed = Wishes(Stop.SIGNAL, save=True)
    agreed.add(Wishes(Stop.WISH, evaluate=True).numbers())
    agreed.add(Wishes(Stop.SIGNAL).numbers())
    assert agreed == Wishes(Stop.WISH, save=True, evaluate=True)
    assert agreed.any
    assert not Wishes().any


def test_a_file_is_a_wish_once_until_it_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = WishFiles(tmp_path, can_evaluate=True)
    assert not files.look().any
    (tmp_path / "save").touch()
    (tmp_path / "evaluate").touch()
    told = files.look()
    assert told == Wishes(save=True, evaluate=True)
    assert not files.look().any  # the same files are not a second wish
    files.done(told, step=7)
    assert list(tmp_path.iterdir()) == []
    assert f"{tmp_path / 'save'}: done at step 7\n" in capsys.readouterr().out
    (tmp_path / "save").touch()
    assert files.look() == Wishes(save=True)


def test_a_stop_by_signal_does_not_use_up_a_wish_to_stop(tmp_path: Path) -> None:
    files = WishFiles(tmp_path, can_evaluate=True)
    (tmp_path / "stop").touch()
    assert files.look().stop == Stop.WISH
    files.done(Wishes(Stop.SIGNAL, save=True), step=3)
    assert (tmp_path / "stop").exists()
    files.done(Wishes(Stop.WISH, save=True), step=3)
    assert not (tmp_path / "stop").exists()


def test_looks_are_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wishes, "LOOK_EVERY_SECONDS", 1000.0)
    files = WishFiles(tmp_path, can_evaluate=True)
    files.look()
    (tmp_path / "save").touch()
    assert not files.look().any


def test_a_run_without_validation_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evaluate").touch()
    assert not WishFiles(tmp_path, can_evaluate=False).look().any
    assert "no validation in this run (validation.every=0)" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_what_a_finished_run_did_not_see_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stop").touch()
    WishFiles(tmp_path, can_evaluate=True).forget()
    assert not (tmp_path / "stop").exists()
    assert "the run had ended before" in capsys.readouterr().out
