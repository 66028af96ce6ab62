"""One Slurm for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Submitter


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(tmp_path_factory.mktemp("slurm") / "cluster")
    yield started
    started.close()


@pytest.fixture
def jobs(cluster: Cluster, manifest: Path, tmp_path: Path) -> Submitter:
    return Submitter(cluster, manifest, tmp_path)
