import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pretrain.data.conftest import manifest, own_copy

__all__ = ["manifest", "own_copy"]

_MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: builds bring their state to disk often, which is slow on some."""
    if not _MEMORY.is_dir():
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir=_MEMORY))
    yield folder
    shutil.rmtree(folder)
