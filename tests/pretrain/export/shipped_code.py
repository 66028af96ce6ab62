"""Where transformers puts the code that it finds beside weights, before it imports it."""

import sys
from pathlib import Path

import pytest
from transformers import dynamic_module_utils


def kept_in(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """In ``folder`` alone, for as long as ``patch`` holds; nothing that was imported from elsewhere is in the way."""
    patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
    patch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        patch.delitem(sys.modules, name)
