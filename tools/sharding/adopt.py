"""Token shards that others wrote, described so that training can read them; their tars stay as they are."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from pretrain.data.files import sha256_of_file
from pretrain.data.manifest import FORMAT_VERSION, MANIFEST_NAME, Dtype, Manifest, Shard
from pretrain.data.shard_index import MAGIC, IndexHeader, index_path, write_index
from pretrain.data.tokenizer import Tokenizer
from pretrain.data.urls import require_plain_name
from pretrain.errors import UserError
from tools.documents import make_folder
from tools.sharding.description import PackedData, PackedSplit, print_summary, spare_tokenizer, write_manifest
from tools.sharding.megatron import GivenVocabulary
from tools.sharding.pack import sole_builder
from tools.sharding.scan import ArrayMember, array_members

# int32 without negative numbers has the bytes of uint32.
_STORED: dict[str, Dtype] = {"<u2": "<u2", "<u4": "<u4", "<i4": "<u4"}


@dataclass(frozen=True, kw_only=True)
class Adoption:
    """What to describe, and how.

    Attributes:
        folder: of the tars.
        out: folder for links to them, the indices and the manifest; None puts both beside the tars.
        vocabulary: a sentencepiece model's, or a given one.
        validation: glob patterns for the names of the tars that are the validation split.
        extension: end of the names of the members with tokens.
        name: of the data set.
    """

    folder: Path
    out: Path | None
    vocabulary: GivenVocabulary | Tokenizer
    validation: Sequence[str] = ()
    extension: str = ".npy"
    name: str = "data"


@dataclass
class _Part:
    """A split while its shards are gone through."""

    token_counts: npt.NDArray[np.int64]
    shards: list[Shard] = field(default_factory=list)


def adopt(adoption: Adoption) -> Manifest:
    """Write a side index for each tar and a manifest for all.

    A member is an array ``[samples, L + 1]`` or one sample ``[L + 1]`` of uint16, uint32 or int32, L the same in all.
    Each sample is trained on as it is: its first L tokens in, its last L to be predicted. A call that was killed starts
    over when it is given again.

    Raises:
        UserError: there are no tars, they are damaged, or their members are of other kinds or lengths.
    """
    out = adoption.out or adoption.folder
    tars = sorted(adoption.folder.glob("*.tar"))
    if not tars:
        raise UserError(f"{adoption.folder} has no .tar")
    for tar in tars:
        require_plain_name(tar.name)
    make_folder(out)
    with sole_builder(out):
        manifest = _adopt(adoption, tars, out)
    print_summary(manifest)
    return manifest


def _adopt(adoption: Adoption, tars: Sequence[Path], out: Path) -> Manifest:
    if (out / MANIFEST_NAME).exists():
        raise UserError(f"{out / MANIFEST_NAME} exists: choose another --out, or remove it")
    vocabulary = adoption.vocabulary
    spare_tokenizer(out, vocabulary.file if isinstance(vocabulary, Tokenizer) else None, vocabulary.sha256)
    parts = {split: _Part(np.zeros(vocabulary.vocab_size, dtype=np.int64)) for split in ("train", "validation")}
    common: ArrayMember | None = None
    for tar in tars:
        members = list(array_members(tar, adoption.extension))
        common = common or (members[0] if members else None)
        if common is None or not members:
            raise UserError(f"{tar} has no member that ends with {adoption.extension}")
        _check_members(tar, members, common)
        split = "validation" if any(fnmatch(tar.name, pattern) for pattern in adoption.validation) else "train"
        parts[split].shards.append(_describe(adoption, tar, members, out, parts[split].token_counts))
    if common is None or not parts["train"].shards or (adoption.validation and not parts["validation"].shards):
        lacking = "training" if not parts["train"].shards else "validation"
        raise UserError(f"--validation {' '.join(adoption.validation)} leaves no .tar for {lacking}")
    return write_manifest(out, _describe_all(adoption, parts, common))


def _describe_all(adoption: Adoption, parts: dict[str, _Part], common: ArrayMember) -> PackedData:
    vocabulary = adoption.vocabulary
    return PackedData(
        name=adoption.name,
        sequence_length=common.length - 1,
        vocab_size=vocabulary.vocab_size,
        eod_id=vocabulary.eod_id,
        dtype=_STORED[common.dtype],
        tokenizer=vocabulary.file if isinstance(vocabulary, Tokenizer) else None,
        tokenizer_sha256=vocabulary.sha256,
        splits={
            split: PackedSplit(
                documents=int(part.token_counts[vocabulary.eod_id]),
                samples=sum(shard.samples for shard in part.shards),
                dropped_tokens=0,
                token_counts=part.token_counts,
                shards=tuple(part.shards),
            )
            for split, part in parts.items()
            if part.shards
        },
        statistics=None,
    )


def _check_members(tar: Path, members: Sequence[ArrayMember], common: ArrayMember) -> None:
    endings = {member.name.rpartition("/")[2].partition(".")[2] for member in members}
    if len(endings) > 1:
        raise UserError(f"{tar} has members {' and '.join(sorted(endings))}: choose the one with tokens by --member")
    for member in members:
        if member.dtype not in _STORED:
            raise UserError(f"{tar}: member {member.name} holds {member.dtype}, not uint16, uint32 or int32")
        if (member.length, member.dtype) != (common.length, common.dtype):
            raise UserError(
                f"{tar}: member {member.name} holds samples of {member.length} {member.dtype}, "
                f"{common.name} of {common.length} {common.dtype}"
            )
        if member.length < 2:
            raise UserError(f"{tar}: member {member.name} holds samples of {member.length} token, 2 are the least")


def _describe(
    adoption: Adoption, tar: Path, members: Sequence[ArrayMember], out: Path, counts: npt.NDArray[np.int64]
) -> Shard:
    """Write the index of one tar, and add its labels to ``counts``."""
    vocabulary = adoption.vocabulary
    dtype = _STORED[members[0].dtype]
    crc32: list[int] = []
    with tar.open("rb") as file:
        for member in members:
            file.seek(member.offset)
            content = file.read(member.rows * member.length * np.dtype(dtype).itemsize)
            block = np.frombuffer(content, dtype=dtype).reshape(member.rows, member.length)
            if int(block.max()) >= vocabulary.vocab_size:
                wrong = int(block.view(member.dtype).min()) if int(block.max()) >= 1 << 31 else int(block.max())
                raise UserError(
                    f"{tar}: member {member.name} has token {wrong}, outside the vocabulary of {vocabulary.vocab_size}"
                )
            counts += np.bincount(block[:, 1:].ravel(), minlength=len(counts))
            crc32.extend(zlib_ng.crc32(row.data) for row in block)
    link = _link(tar, out)
    index = index_path(link)
    if index.exists() and not _is_ours(index):
        raise UserError(f"{index} is there already and not ours: choose a folder for the indices by --out")
    header = IndexHeader(
        version=FORMAT_VERSION,
        tar=tar.name,
        tar_bytes=tar.stat().st_size,
        tar_sha256=sha256_of_file(tar),
        tokenizer_sha256=vocabulary.sha256,
        eod_id=vocabulary.eod_id,
        dtype=dtype,
        sample_length=members[0].length,
        samples=len(crc32),
        members=len(members),
    )
    offsets, rows = [member.offset for member in members], [member.rows for member in members]
    return Shard(
        file=tar.name,
        samples=header.samples,
        bytes=header.tar_bytes,
        sha256=header.tar_sha256,
        index_sha256=write_index(index, header, offsets, rows, crc32),
    )


def _link(tar: Path, out: Path) -> Path:
    """A name for the tar in ``out``: itself, or a link."""
    link = out / tar.name
    if link.is_symlink() or link.exists():
        if not link.exists() or not link.samefile(tar):
            raise UserError(f"{link} is there already, and another file than {tar}")
        return link
    try:
        os.link(tar.resolve(), link)
    except OSError:
        # Another file system: a manifest names files of its own folder, so a symbolic link stands there.
        link.symlink_to(tar.resolve())
    return link


def _is_ours(index: Path) -> bool:
    """Whether a file is a side index, as an earlier call that was killed may have left it."""
    with index.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
