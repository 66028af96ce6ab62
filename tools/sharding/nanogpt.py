"""nanoGPT's ``train.bin`` and ``val.bin`` into shards: uint16 tokens one behind the other, without an index."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.data.manifest import Manifest
from pretrain.errors import UserError
from tools.sharding.megatron import Corpus, GivenVocabulary, Import, import_corpora

GPT2 = GivenVocabulary(vocab_size=50257, eod_id=50256)
"""The tokenizer of nanoGPT's scripts: what they append to every document is GPT-2's end of text."""

_AT_ONCE = 1 << 26
_WIDER_SHOWS = 128  # bytes from which on text that has a 0 at every second place is none


def import_nanogpt(train: Sequence[Path], validation: Sequence[Path], settings: Import) -> Manifest:
    """Pack the documents, which end with the end-of-document token; goes on after an interruption as a build does.

    Args:
        train: files of training tokens.
        validation: files of held-out tokens; without any, a share of the documents is held out.
        settings: the rest.

    Raises:
        UserError: a file cannot be such tokens, or as for a build.
    """
    if not isinstance(settings.vocabulary, GivenVocabulary):
        raise UserError("nanoGPT's files have no sentencepiece tokens: give --vocab-size and --eod-id, not --tokenizer")
    files = [file.resolve() for file in (*train, *validation)]
    for number, file in enumerate(files):
        if file in files[:number]:
            raise UserError(
                f"{file} is given twice, so that its documents would be repeated or held out and trained on"
            )
    eod_id = settings.vocabulary.eod_id
    corpora = [_read(file, eod_id, False if validation else None) for file in train]
    corpora += [_read(file, eod_id, True) for file in validation]
    return import_corpora(corpora, settings, {"format": "nanogpt"})


def _read(file: Path, eod_id: int, held_out: bool | None) -> Corpus:
    if not file.is_file():
        raise UserError(f"{file} {'is no file' if file.exists() else 'does not exist'}; give nanoGPT's .bin files")
    size = file.stat().st_size
    if not size or size % 2:
        raise UserError(f"{file} has {size} bytes, which are no uint16 tokens")
    tokens = np.memmap(file, dtype="<u2", mode="r")
    if size >= _WIDER_SHOWS and not tokens[1 : _WIDER_SHOWS // 2 : 2].any():
        raise UserError(f"{file} holds wider numbers: every second uint16 is 0; write its tokens as uint16")
    ends = _ends(tokens, eod_id)
    if not len(ends):
        raise UserError(f"{file} holds no token {eod_id}, which should end its documents; is it the right --eod-id?")
    if ends[-1] != len(tokens):
        ends = np.append(ends, len(tokens))
    return Corpus(file, tokens, ends, held_out)


def _ends(tokens: npt.NDArray[np.integer], eod_id: int) -> npt.NDArray[np.int64]:
    """Where documents end, int64, looked for in pieces that fit into memory."""
    found = [
        np.flatnonzero(tokens[first : first + _AT_ONCE] == eod_id) + first + 1
        for first in range(0, len(tokens), _AT_ONCE)
    ]
    return np.concatenate(found).astype(np.int64)
