"""Documents out of tars of raw text, as webdataset reads them; what it loses on the way is counted.

A sample is the neighbouring members whose names agree up to the first dot. Its document is the member .txt, or else a
field of the member .json. Members of any other type are never looked at, and none is decoded by webdataset, which
would unpickle some.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from webdataset.tariterators import group_by_keys, tar_file_expander

from pretrain.data.shard_bytes import ShardBytes
from pretrain.data.tar_census import TEXT_SUFFIXES, TarCensus, split_name
from pretrain.data.text import NoTextError, text_of_json, text_of_plain
from pretrain.errors import UserError


@dataclass(frozen=True)
class Arrival:
    """A document as it came.

    Attributes:
        name: of the sample.
        content: the member that should hold its text.
        text: the text; None where there is none.
        fault: why there is none.
    """

    name: str
    content: bytes
    text: str | None
    fault: str = ""


@dataclass(frozen=True)
class Losses:
    """What a shard held and did not give.

    Attributes:
        lost: documents that damage cost, as far as they can be counted.
        passed_over: samples without a member .txt or .json, and files that belong to no sample.
        line: what happened, in words; empty when nothing was lost.
    """

    lost: int
    passed_over: int
    line: str


def arrivals(shard: ShardBytes, text_field: str) -> Iterator[Arrival]:
    """The documents of a shard, in order; at the end its census is complete.

    Raises:
        UserError: its bytes cannot be had.
    """
    stream = [{"url": shard.where, "stream": shard}]
    members = tar_file_expander(stream, handler=_end, select_files=_is_text)
    for sample in group_by_keys(members, handler=_go_on):
        yield _arrival(sample, text_field)
    if shard.fault is not None:
        raise UserError(shard.fault)
    shard.drain()


def losses(census: TarCensus, where: str, arrived: int) -> Losses:
    """Compare what arrived of a shard with what its census found."""
    lost = max(0, census.documents - arrived) + census.documents_in_gaps
    passed_over = census.textless + census.unnamed
    said = [] if census.first_gap is None else [f"has no sound header at byte {census.first_gap}"]
    said += ["has more behind its end mark, where webdataset stops"] if census.joined else []
    said += ["is cut off, and what is missing cannot be counted"] if census.cut else []
    if not (lost or said):
        return Losses(0, passed_over, "")
    return Losses(
        lost,
        passed_over,
        f"shard {where} {' and '.join(said) or 'repeats names of members'}: {arrived} documents arrived, "
        f"{lost} were lost",
    )


def _end(error: Exception) -> bool:
    """Read no more of a shard: what follows damage has no place to begin at."""
    return False


def _go_on(error: Exception) -> bool:
    """Leave out a member whose name its sample had before; the census knows of it."""
    return True


def _is_text(name: str) -> bool:
    key, suffix = split_name(name)
    return key is not None and suffix in TEXT_SUFFIXES


def _arrival(sample: dict[str, Any], text_field: str) -> Arrival:
    name = sample["__key__"]
    content: bytes = sample.get("txt", sample.get("json", b""))
    try:
        text = text_of_plain(content) if "txt" in sample else text_of_json(content, text_field)
    except NoTextError as error:
        return Arrival(name, content, None, error.kind)
    return Arrival(name, content, text)
