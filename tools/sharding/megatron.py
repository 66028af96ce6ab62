"""Megatron's ``.bin`` and ``.idx``, as it and its ancestors write them, into shards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.files import sha256_of_file
from pretrain.data.manifest import NO_TOKENIZER, Manifest
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tools.documents import is_validation, make_folder
from tools.inputs import Fault, Progress
from tools.shard_writer import ShardLayout, Vocabulary, dtype_of
from tools.sharding.description import print_summary
from tools.sharding.encode import Encoded
from tools.sharding.pack import Packing, Target, finished, sole_builder
from tools.sharding.seen import hashes_of

_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_UNIT_TOKENS = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """Tokens and the documents that they make up.

    Attributes:
        path: of the tokens, for messages.
        tokens: of all documents, mapped from the file.
        ends: int64 ``[documents]``, where each document ends in ``tokens``.
        held_out: whether all of them are validation, or none; None divides them by their hashes.
    """

    path: Path
    tokens: npt.NDArray[np.integer]
    ends: npt.NDArray[np.int64]
    held_out: bool | None = None


@dataclass
class GivenVocabulary:
    """A vocabulary of which only the numbers are known."""

    vocab_size: int
    eod_id: int
    sha256: str = NO_TOKENIZER


@dataclass(frozen=True, kw_only=True)
class Import:
    """How to import; as :class:`tools.sharding.build.Building`, but for the vocabulary.

    Attributes:
        vocabulary: a sentencepiece model's, or a given one.
    """

    vocabulary: GivenVocabulary | Tokenizer
    out: Path
    layout: ShardLayout
    validation_fraction: float
    deduplicate: bool = False
    strict: bool = False
    force: bool = False
    save_seconds: float = 10.0


def import_megatron(prefix: Path, settings: Import) -> Manifest:
    """Pack the documents of a Megatron data set; goes on after an interruption as a build does.

    Documents that do not end with the end-of-document token get one. Empty ones, and those with a token outside the
    vocabulary, are dropped and counted.

    Args:
        prefix: path of both files without ``.bin`` and ``.idx``.
        settings: the rest.

    Raises:
        UserError: the files are not what Megatron writes, or as for a build.
    """
    corpus = read_corpus(prefix)
    return import_corpora([corpus], settings, {"index": sha256_of_file(prefix.with_name(prefix.name + ".idx"))})


def import_corpora(corpora: Sequence[Corpus], settings: Import, recipe: dict[str, Any]) -> Manifest:
    """Pack the documents of several files, in this order.

    Args:
        corpora: the files.
        settings: how.
        recipe: what an interrupted call must have in common with this one beside the settings and the files.

    Raises:
        UserError: as for a build.
    """
    vocabulary, layout = settings.vocabulary, settings.layout
    make_folder(settings.out)
    files = [[str(corpus.path), corpus.tokens.nbytes, corpus.path.stat().st_mtime_ns] for corpus in corpora]
    target = Target(
        out=settings.out,
        layout=layout,
        vocabulary=vocabulary,
        tokenizer=vocabulary.file if isinstance(vocabulary, Tokenizer) else None,
        recipe=recipe
        | {
            "files": files,
            "held_out": [corpus.held_out for corpus in corpora],
            "vocab_size": vocabulary.vocab_size,
            "eod_id": vocabulary.eod_id,
            "tokenizer": vocabulary.sha256,
            "name": layout.name,
            "sequence_length": layout.sequence_length,
            "samples_per_member": layout.samples_per_member,
            "members_per_shard": layout.members_per_shard,
            "validation_fraction": settings.validation_fraction,
            "deduplicate": settings.deduplicate,
        },
        force=settings.force,
        strict=settings.strict,
        deduplicate=settings.deduplicate,
        save_seconds=settings.save_seconds,
    )
    with sole_builder(settings.out):
        manifest = finished(target) or _pack(settings, corpora, target)
    print_summary(manifest)
    return manifest


def _pack(settings: Import, corpora: Sequence[Corpus], target: Target) -> Manifest:
    packing = Packing(target)
    progress = Progress("importing", sum(corpus.tokens.nbytes for corpus in corpora), done=packing.read)
    try:
        first_file, first = packing.position
        read = sum(corpus.tokens.nbytes for corpus in corpora[:first_file])
        for number, corpus in enumerate(corpora[first_file:], start=first_file):
            for unit in _units(corpus, settings, number, first if number == first_file else 0, read):
                packing.take(unit)
                progress.tell(packing.account.documents, packing.read - progress.done, packing.read)
            read += corpus.tokens.nbytes
        progress.end()
        return packing.finish()
    except BaseException:
        progress.end()
        packing.close()
        raise


def _units(corpus: Corpus, settings: Import, file: int, first: int, read: int) -> Iterator[Encoded]:
    """The documents of a file from a number on, about a million tokens at a time; ``read`` bytes lie before it."""
    while first < len(corpus.ends):
        start = int(corpus.ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(corpus.ends, start + _UNIT_TOKENS, side="right")))
        encoded = _encode(corpus, settings, first, last)
        yield replace(encoded, end=(file, last), read=read + encoded.read)
        first = last


def _encode(corpus: Corpus, settings: Import, first: int, last: int) -> Encoded:
    vocabulary: Vocabulary = settings.vocabulary
    dtype = dtype_of(vocabulary.vocab_size)
    end_token = np.array([vocabulary.eod_id], dtype=dtype)
    kept: list[npt.NDArray[np.unsignedinteger]] = []
    contents: list[bytes] = []
    faults: list[Fault] = []
    for number in range(first, last):
        start = int(corpus.ends[number - 1]) if number else 0
        tokens = corpus.tokens[start : int(corpus.ends[number])]
        if len(tokens) and tokens[-1] == vocabulary.eod_id:
            tokens = tokens[:-1]
        where = f"{corpus.path}:document {number}"
        if not len(tokens):
            faults.append(Fault(where, "empty"))
        elif int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary.vocab_size:
            faults.append(Fault(where, f"token outside the vocabulary of {vocabulary.vocab_size}"))
        else:
            kept.append(np.concatenate([tokens.astype(dtype), end_token]))
            contents.append(tokens.astype("<u4").tobytes())
    return Encoded(
        end=(0, last),
        read=int(corpus.ends[last - 1]) * corpus.tokens.itemsize,
        tokens=np.concatenate(kept) if kept else np.zeros(0, dtype=dtype),
        lengths=np.array([len(tokens) for tokens in kept], dtype=np.int64),
        validation=np.array([_is_held_out(content, corpus, settings) for content in contents], dtype=bool),
        text_bytes=np.zeros(len(kept), dtype=np.int64),
        hashes=hashes_of(contents) if settings.deduplicate else None,
        faults=faults,
    )


def _is_held_out(content: bytes, corpus: Corpus, settings: Import) -> bool:
    return is_validation(content, settings.validation_fraction) if corpus.held_out is None else corpus.held_out


def read_corpus(prefix: Path) -> Corpus:
    """Map the files of a Megatron data set.

    Sources of the format: ``megatron.core.datasets.indexed_dataset`` (``MMIDIDX``, version 1), the memory-mapped one of
    fairseq that it descends from and that has no document index, and the older ``TNTIDX`` of both. Where there is no
    document index, each sequence is a document.

    Raises:
        UserError: a file is missing, of another format or cut off.
    """
    index, binary = (prefix.with_name(prefix.name + suffix) for suffix in (".idx", ".bin"))
    for file in (index, binary):
        if not file.is_file():
            raise UserError(f"{file} does not exist; give both files' path without .bin and .idx")
    content = np.fromfile(index, dtype=np.uint8)
    try:
        dtype, lengths, documents = _parse_index(content)
    except _BadIndexError as error:
        raise UserError(f"{index} is no index that Megatron wrote: {error}") from error
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    size, expected = binary.stat().st_size, int(ends[-1]) * dtype.itemsize
    if size != expected:
        raise UserError(f"{binary} has {size} bytes, its index says {expected}")
    if not expected:
        raise UserError(f"{binary} is empty")
    return Corpus(binary, np.memmap(binary, dtype=dtype, mode="r"), ends[documents[1:]])


class _BadIndexError(Exception):
    """Bytes that are not the index they should be."""


def _parse_index(
    content: npt.NDArray[np.uint8],
) -> tuple[np.dtype[np.integer], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The tokens' type, the length of each sequence, and the sequence at which each document begins, with the end."""
    head = content[:9].tobytes()
    if head == b"MMIDIDX\0\0":
        code, lengths, starts, documents = _parse_mapped(content)
    elif head[:8] == b"TNTIDX\0\0":
        code, lengths, starts, documents = _parse_older(content)
    else:
        raise _BadIndexError("it begins with other bytes")
    if code not in _DTYPES:
        raise _BadIndexError(f"type code {code} is none of whole numbers")
    if lengths.min(initial=0) < 0 or not np.array_equal(starts, np.cumsum(lengths) - lengths):
        raise _BadIndexError("its sequences do not follow one another")
    if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        raise _BadIndexError("its document index does not run from the first sequence to the last")
    return np.dtype(_DTYPES[code]), lengths, documents


_Parsed = tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _parse_mapped(content: npt.NDArray[np.uint8]) -> _Parsed:
    """``MMIDIDX``: version, type, sequences, documents; then lengths (int32), byte offsets and documents (int64)."""
    if len(content) < 26 or _number(content, 9) != 1:
        raise _BadIndexError("it is not of version 1")
    code, sequences = int(content[17]), _number(content, 18)
    # fairseq writes no documents, and so no count of them.
    has_documents = len(content) != 26 + 12 * sequences
    start = 34 if has_documents else 26
    count = _number(content, 26) if has_documents else 0
    expected = start + 12 * sequences + 8 * count
    if len(content) == expected + sequences and sequences:
        raise _BadIndexError("it has modes of sequences, as multimodal data do")
    if len(content) != expected:
        raise _BadIndexError(f"it has {len(content)} bytes instead of {expected}")
    lengths = content[start : start + 4 * sequences].view("<i4").astype(np.int64)
    offsets = content[start + 4 * sequences : start + 12 * sequences].view("<i8")
    width = np.dtype(_DTYPES.get(code, "u1")).itemsize
    documents = content[start + 12 * sequences :].view("<i8") if has_documents else np.arange(sequences + 1)
    return code, lengths, offsets // width, documents.astype(np.int64)


def _parse_older(content: npt.NDArray[np.uint8]) -> _Parsed:
    """``TNTIDX``: version, type, width, items, sizes, documents; then dimensions, offsets, sizes, documents (int64)."""
    if len(content) < 48 or _number(content, 8) != 1:
        raise _BadIndexError("it is not of version 1")
    code, items, sizes = _number(content, 16), _number(content, 32), _number(content, 40)
    has_documents = len(content) != 48 + 8 * (2 * (items + 1) + sizes)
    start = 56 if has_documents else 48
    count = _number(content, 48) if has_documents else 0
    if len(content) != start + 8 * (2 * (items + 1) + sizes + count):
        raise _BadIndexError(f"it has {len(content)} bytes, which its counts contradict")
    if items != sizes:
        raise _BadIndexError("its items have more than one dimension")
    numbers = content[start:].view("<i8").astype(np.int64)
    lengths = numbers[2 * (items + 1) : 2 * (items + 1) + sizes]
    documents = numbers[2 * (items + 1) + sizes :] if has_documents else np.arange(items + 1)
    return code, lengths, numbers[items + 1 : 2 * items + 1], documents


def _number(content: npt.NDArray[np.uint8], place: int) -> int:
    """Eight bytes as a number, 0 where they are cut off."""
    return int.from_bytes(content[place : place + 8].tobytes(), "little")
