"""Fixtures that several test folders share."""

from pathlib import Path

import pytest

from tests.pretrain.runs import build_data


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set of real text."""
    return build_data(tmp_path_factory.mktemp("data"))
