from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.data.manifest import Manifest
from tests.pretrain.data.small import build_small
from tests.servers.s3 import S3Server, s3_server


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The small data set, not to be changed."""
    return build_small(tmp_path_factory.mktemp("small"))


@pytest.fixture
def own_copy(manifest: Manifest, tmp_path: Path) -> Path:
    """A folder with the small data set that a test may damage."""
    for file in manifest.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server, one for all tests."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server
