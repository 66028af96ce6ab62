"""A drawn figure as the bytes of a file."""

import io

from matplotlib.figure import Figure


def as_png(figure: Figure, dpi: int) -> bytes:
    """The picture's bytes, at ``dpi`` pixels an inch."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=dpi)
    return image.getvalue()
