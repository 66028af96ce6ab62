"""What the commands about Hugging Face need beside the rest of the program."""

import importlib.util
import os

from pretrain.errors import UserError

_NEEDED = ("transformers", "safetensors")


def require_transformers(command: str) -> None:
    """See that the extra packages are there, and let them be quiet and stay offline.

    Raises:
        UserError: they are not.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{command} needs {' and '.join(missing)}; install the extra by: pip install -e '.[hf]'")
    # Read when transformers is imported. All that is needed lies in the folder that the user names.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
