"""Many places named at once by braces, as in ``web-{00000..00999}.tar``."""

import re
from collections.abc import Sequence

from pretrain.data.urls import scheme_of
from pretrain.errors import UserError
from pretrain.redaction import redact

MAX_PLACES = 1_000_000
_HUGE_RANGE = re.compile(r"\{[^{}]*\d{7,}\.\.|\.\.-?\d{7,}[^{}]*\}")


def expand_places(named: Sequence[str], setting: str) -> list[str]:
    """Every single place, without order or repetition.

    Args:
        named: places with or without braces; a backslash in front of a brace makes it an ordinary character.
        setting: that names them, for messages.

    Raises:
        UserError: braces that do not match or name too many, a scheme that is not supported, or a place named twice.
    """
    from braceexpand import braceexpand  # late: where only models are timed it may be missing

    places: dict[str, None] = {}
    for pattern in named:
        if _HUGE_RANGE.search(pattern):
            raise UserError(f"{setting}={redact(pattern)}: braces that name more than {MAX_PLACES} shards")
        try:
            expanded = braceexpand(pattern)
        except ValueError:
            raise UserError(f"{setting}={redact(pattern)}: the braces do not match") from None
        for place in expanded:
            scheme_of(place)
            if place in places:
                raise UserError(f"{setting} names {redact(place)} twice; its texts would be read twice")
            if len(places) == MAX_PLACES:
                raise UserError(f"{setting} names more than {MAX_PLACES} shards")
            places[place] = None
    return sorted(places)


def relative_names(places: Sequence[str]) -> list[str]:
    """The places without the folders that all of them share and without query strings: the same when all have moved."""
    split = [place.partition("?")[0].split("/") for place in places]
    shared = 0
    while all(shared < len(parts) - 1 for parts in split) and len({parts[shared] for parts in split}) == 1:
        shared += 1
    return ["/".join(parts[shared:]) for parts in split]
