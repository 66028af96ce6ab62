import pytest

from tests.launch import launch


@pytest.mark.dist
def test_one_ranks_failure_is_that_of_all() -> None:
    first, second = launch("tests.pretrain.together_worker", 2)
    assert first.splitlines() == ["None", "rank 1 fails", "rank 0 fails", "None"]
    assert second.splitlines() == ["1", "rank 1 fails", "rank 0 fails", "1"]
