"""A folder that is there whole, or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretrain.errors import UserError


@contextmanager
def new_folder(out: Path, argument: str) -> Iterator[Path]:
    """A hidden folder beside ``out`` that gets its name once all within went well, and vanishes otherwise.

    Args:
        out: the name.
        argument: of the command line, that gave the name.

    Raises:
        UserError: ``out`` is there already, or cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{argument} {out} exists already; remove it or name another folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    except OSError as error:
        raise UserError(f"{argument} {out} cannot be written: {error.strerror}") from None
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(out)
    except OSError as error:
        raise UserError(f"{argument} {out} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
