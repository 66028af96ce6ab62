"""Arrays inside JSON."""

import base64
from typing import Any

import numpy as np
import numpy.typing as npt


def to_text(array: npt.NDArray[Any]) -> dict[str, str]:
    """A one-dimensional array as JSON values."""
    return {"dtype": array.dtype.str, "base64": base64.b64encode(array.tobytes()).decode("ascii")}


def from_text(value: dict[str, str]) -> npt.NDArray[Any]:
    """The array that :func:`to_text` was given."""
    return np.frombuffer(base64.b64decode(value["base64"]), dtype=value["dtype"]).copy()
