"""The engine in one process, through a worker of its own: DeepSpeed keeps global state."""

import pytest

from tests.launch import launch

pytestmark = pytest.mark.dist


def test_engine_worker() -> None:
    (output,) = launch("tests.pretrain.engine_worker", 1)
    assert output.splitlines()[-1] == "all checks passed"
