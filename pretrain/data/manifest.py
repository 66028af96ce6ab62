"""The manifest of a data set: what its shards hold, and the fingerprint that names exactly these bytes.

A data set is a folder, local or remote: tar shards, one side index (:mod:`pretrain.data.shard_index`) beside each, a
copy of the tokenizer, and ``manifest.json``, which is written last. Whoever sees a manifest sees a complete data set.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from pretrain.data.folder import Access, Entry, Folder, LocalFolder
from pretrain.data.urls import is_remote, local_path, require_plain_name, shorten
from pretrain.errors import UserError
from pretrain.redaction import redact

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2

# More than a manifest of 100,000 shards and a vocabulary of a million, and than any tokenizer.
_LARGEST_MANIFEST = 1 << 28
_LARGEST_TOKENIZER = 1 << 26

# In the place of a tokenizer's sha256 where the tokens came without a sentencepiece model.
NO_TOKENIZER = "none"

Dtype = Literal["<u2", "<u4"]

# Bounded, so that products and sums of a stranger's numbers stay numbers of 64 bits.
_LARGEST = 1 << 50
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
PositiveCount = Annotated[int, Field(gt=0, le=_LARGEST)]

SPLITS = ("train", "validation")
# Names of members in a tar begin with it: no dot, where webdataset ends its keys, and short enough for USTAR.
DATASET_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One tar of samples.

    Attributes:
        file: name of the tar inside the data set's folder.
        samples: stored samples.
        bytes: size of the tar.
        sha256: of the tar, hex.
        index_sha256: of the side index beside it, hex.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    file: str
    samples: PositiveCount
    bytes: PositiveCount
    sha256: str
    index_sha256: str


@dataclass(frozen=True, kw_only=True)
class Split:
    """The training or the validation part.

    Attributes:
        documents: documents that entered the split; 0 where foreign shards do not tell.
        tokens: labels of the stored samples, which are their tokens but the first of each.
        samples: stored samples of ``sequence_length + 1`` tokens.
        dropped_tokens: the tail that did not fill a sample.
        unigram_entropy: nats per token. Training split: entropy of its own token frequencies. Validation split: cross
            entropy of its tokens under the training frequencies with add-one smoothing.
        shards: in the order of the stored samples.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    documents: Count
    tokens: PositiveCount
    samples: PositiveCount
    dropped_tokens: Count
    unigram_entropy: float
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What went into a data set: records read are documents, duplicates, and the dropped of each kind.

    Attributes:
        records: read from the inputs.
        documents: of them, kept.
        duplicates: left out because an earlier document is the same.
        dropped: records without a usable document, by the kind of their fault.
        text_bytes: UTF-8 of the kept documents; 0 where the source was tokens.
        document_tokens: of the kept documents, end-of-document tokens included.
        bytes_per_token: text_bytes / document_tokens; None where the source was tokens.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    records: Count
    documents: Count
    duplicates: Count
    dropped: dict[str, PositiveCount]
    text_bytes: Count
    document_tokens: Count
    bytes_per_token: float | None


@dataclass(frozen=True, kw_only=True)
class Description:
    """The content of ``manifest.json``, key for key; :class:`Manifest` explains the fields."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    version: int
    name: str
    sequence_length: PositiveCount
    vocab_size: PositiveCount
    eod_id: Count
    dtype: Dtype
    tokenizer_file: str | None
    tokenizer_sha256: str
    token_counts: tuple[Count, ...]
    splits: dict[str, Split]
    statistics: Statistics | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A data set that was found complete.

    Attributes:
        folder: of the manifest and the shards.
        name: of the data set.
        sequence_length: L; a stored sample has L + 1 tokens.
        vocab_size: real size of the tokenizer.
        eod_id: token that ends each document.
        dtype: numpy type of the stored tokens, little-endian.
        tokenizer_file: the sentencepiece model beside the manifest; None for imported tokens of another tokenizer.
        tokenizer_sha256: of that file, hex; ``NO_TOKENIZER`` where there is none.
        token_counts: int64 ``[vocab_size]``, over the labels of the training split.
        splits: by name, ``train`` and ``validation``.
        statistics: of the building, where it is known.
        fingerprint: sha256 of the canonical JSON, hex; through the sha256 of each file it covers every stored byte.
    """

    folder: Folder
    name: str
    sequence_length: int
    vocab_size: int
    eod_id: int
    dtype: Dtype
    tokenizer_file: Path | None
    tokenizer_sha256: str
    token_counts: npt.NDArray[np.int64]
    splits: Mapping[str, Split]
    statistics: Statistics | None
    fingerprint: str

    @property
    def directory(self) -> Path:
        """The folder, where it is on a disk; UserError where it is remote."""
        return self.folder.directory

    def split(self, name: str) -> Split:
        """The split of that name; UserError when the data set has none."""
        if name not in self.splits:
            raise UserError(
                f"data set {self.name!r} in {self.folder.where} has no split {name!r}; it has {sorted(self.splits)}"
            )
        return self.splits[name]


def canonical_json(content: object) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces, ASCII."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def describe_first_error(error: ValidationError) -> str:
    """The first complaint of a validation in one line: where, what."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the top level"
    return f"{where}: {first['msg']}"


def read_json(path: Path, what: str) -> Any:
    """Parse a JSON file; UserError in one line when it is absent, unreadable or no JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{what} {path} does not exist") from None
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} {path} is no JSON: {error}") from error


def load_manifest(place: Path | str, access: Access | None = None) -> Manifest:
    """Read and check a manifest, named by its file, its local folder or its URL; shards are checked when opened.

    Args:
        place: a path, or a URL of file, http, https or s3.
        access: how remote folders are reached; None for the defaults.

    Raises:
        UserError: it is absent, damaged, of another format version, contradicts itself, or its tokenizer is missing.
    """
    content, folder, path = _read(str(place), access or Access())
    version = content.get("version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"manifest {path} has format version {version}, this program reads {FORMAT_VERSION}: build it anew"
        )
    try:
        description = TypeAdapter(Description).validate_python(content)
    except ValidationError as error:
        raise UserError(f"manifest {path} is damaged at {describe_first_error(error)}") from error
    fault = _contradiction(description)
    if fault:
        raise UserError(f"manifest {path} is damaged: {fault}")
    tokenizer_file = None
    if description.tokenizer_file is not None:
        entry = Entry(description.tokenizer_file, description.tokenizer_sha256, None, _LARGEST_TOKENIZER)
        tokenizer_file = folder.keep(entry)
        if not tokenizer_file.is_file():
            raise UserError(f"tokenizer {tokenizer_file}, named in {MANIFEST_NAME}, does not exist")
    return Manifest(
        folder=folder,
        name=description.name,
        sequence_length=description.sequence_length,
        vocab_size=description.vocab_size,
        eod_id=description.eod_id,
        dtype=description.dtype,
        tokenizer_file=tokenizer_file,
        tokenizer_sha256=description.tokenizer_sha256,
        token_counts=np.array(description.token_counts, dtype=np.int64),
        splits=description.splits,
        statistics=description.statistics,
        fingerprint=hashlib.sha256(canonical_json(content)).hexdigest(),
    )


def _read(place: str, access: Access) -> tuple[Any, Folder, str]:
    """A manifest's content, its folder, and its own place for messages."""
    if not is_remote(place):
        path = local_path(place)
        path = path / MANIFEST_NAME if path.is_dir() else path
        return read_json(path, "manifest"), LocalFolder(path.parent), str(path)
    text, folder = access.read(place, _LARGEST_MANIFEST)
    try:
        return json.loads(text), folder, redact(place)
    except (ValueError, RecursionError) as error:
        raise UserError(f"manifest {redact(place)} is no JSON: {error}") from error


def _contradiction(description: Description) -> str | None:
    """What in a well-formed manifest cannot be true, if anything."""
    files = [shard.file for split in description.splits.values() for shard in split.shards]
    for file in (*files, description.tokenizer_file):
        try:
            require_plain_name(file or MANIFEST_NAME)
        except UserError as error:
            return str(error)
    if not DATASET_NAME.fullmatch(description.name):
        return f"{shorten(description.name)} is no name of 1 to 40 letters, digits, - or _"
    if "train" not in description.splits or not set(description.splits) <= set(SPLITS):
        return f"its splits are {shorten(', '.join(description.splits))}, not train or train and validation"
    if (description.tokenizer_file is None) != (description.tokenizer_sha256 == NO_TOKENIZER):
        return f"tokenizer_file {description.tokenizer_file} has sha256 {description.tokenizer_sha256}"
    if len(set(files)) != len(files):
        return "a shard is named twice"
    if len(description.token_counts) != description.vocab_size:
        return f"token_counts has {len(description.token_counts)} entries for {description.vocab_size} pieces"
    if description.eod_id >= description.vocab_size:
        return f"eod_id {description.eod_id} is outside the vocabulary of {description.vocab_size}"
    for name, split in description.splits.items():
        if sum(shard.samples for shard in split.shards) != split.samples:
            return f"the shards of split {name!r} do not add up to its {split.samples} samples"
        for shard in split.shards:
            if shard.samples * (description.sequence_length + 1) * np.dtype(description.dtype).itemsize > shard.bytes:
                return f"{shard.samples} samples do not fit the {shard.bytes} bytes of {shard.file}"
    return None
