import time

import pytest

from tests.launch import LaunchError, launch

WORKER = "tests.echo_worker"


def test_every_process_gets_its_rank_and_its_output_comes_back() -> None:
    outputs = launch(WORKER, 2, "a", "b")
    assert outputs == [f"{i} 2 {i} 127.0.0.1 1 cpu a b\n" for i in range(2)]


def test_a_failure_ends_all_at_once_and_shows_every_output() -> None:
    started = time.monotonic()
    with pytest.raises(LaunchError) as failure:
        launch(WORKER, 2, "fail")
    assert time.monotonic() - started < 60
    message = str(failure.value)
    assert "exit status by global rank {1: 1}" in message
    assert "told to fail" in message
    assert "0 2 0 127.0.0.1" in message


def test_a_timeout_names_who_is_still_running() -> None:
    with pytest.raises(LaunchError, match=r"timed out; still running: global ranks \[0, 1\]"):
        launch(WORKER, 2, "hang", timeout=2)
