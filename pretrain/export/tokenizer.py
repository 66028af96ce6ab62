"""A sentencepiece model as a tokenizer of transformers, with sentencepiece's own ids.

A BPE model becomes a tokenizer that transformers has itself (tokenizer.json), if it gives sentencepiece's ids on texts
of all kinds; else the sentencepiece model is written with a small class around it, which needs
``trust_remote_code=True``. In both, text that spells the end of a document stays text.
"""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.data.tokenizer import SPACE_MARK, Tokenizer
from pretrain.errors import UserError

_MODULE = "tokenization_sphere_pretrain"
_RANDOM_TEXTS = 400
_CHARACTERS = "aabcdeeestn  \n\t.,'\u00e9\u00df\u0301\u4e2d\u6587\U0001f600<>|\u00a0\u3000\r" + SPACE_MARK


def write_tokenizer(file: Path, eod_id: int, folder: Path) -> str:
    """Write the tokenizer of a sentencepiece model beside a model's weights.

    Returns:
        ``stock`` or ``own``.

    Raises:
        UserError: neither gives sentencepiece's ids.
    """
    tokenizer = Tokenizer(file, eod_id)
    texts = sample_texts(tokenizer)
    for kind, write in (("stock", _write_stock), ("own", _write_own)):
        written = write(tokenizer, folder)
        if not differing(tokenizer, written, texts):
            return kind
        for path in folder.glob("*token*"):
            path.unlink()
    raise UserError(f"{file} cannot be exported: transformers gives other ids than sentencepiece")


def differing(tokenizer: Tokenizer, written: Any, texts: Sequence[str]) -> list[str]:
    """The texts that ``written``, a tokenizer of transformers, encodes or decodes otherwise than sentencepiece."""
    found = []
    for text in texts:
        ids = tokenizer.processor.encode(text)
        if written(text).input_ids != ids or written.decode(ids) != tokenizer.processor.decode(ids):
            found.append(text)
    return found


def sample_texts(tokenizer: Tokenizer) -> list[str]:
    """Texts of all kinds: odd spaces, bytes, control symbols spelled out, random pieces, random characters."""
    processor = tokenizer.processor
    controls = [processor.id_to_piece(i) for i in range(tokenizer.vocab_size) if processor.is_control(i)]
    texts = ["", " ", "   ", " a", "a ", "  two  spaces ", "\n\nnew\n lines\n", "tab\t\r\n", "\x00\x01", "<unk><0x41>"]
    texts += [f"before{symbol}after {symbol}" for symbol in controls[:10]]
    pieces = [i for i in range(tokenizer.vocab_size) if not processor.is_control(i)]
    draw = random.Random(0)
    for _ in range(_RANDOM_TEXTS):
        texts.append(processor.decode(draw.choices(pieces, k=draw.randint(1, 60))))
        texts.append("".join(draw.choices(_CHARACTERS, k=draw.randint(1, 60))))
    return texts


def _special(tokenizer: Tokenizer) -> dict[str, str]:
    eod = tokenizer.processor.id_to_piece(tokenizer.eod_id)
    unknown = tokenizer.processor.id_to_piece(tokenizer.processor.unk_id())
    return {"unk_token": unknown, "bos_token": eod, "eos_token": eod, "pad_token": eod}


def _write_stock(tokenizer: Tokenizer, folder: Path) -> Any:
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    special = _special(tokenizer)
    vocabulary, merges = _merges(tokenizer.processor)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=special["unk_token"], fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE_MARK, prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()],
    )
    backend.add_special_tokens([AddedToken(special["eos_token"], special=True, normalized=False)])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, split_special_tokens=True, **special
    ).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    # The name that releases before 5.0 know, too.
    _write_json(path, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    return AutoTokenizer.from_pretrained(folder)


def _merges(processor: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Piece -> id, and all pairs of pieces that make a piece, the best first: sentencepiece joins by the joint's score.

    Pairs that make the same piece stand in the order of their parts' ids.
    """
    size = processor.get_piece_size()
    vocabulary = {processor.id_to_piece(i): i for i in range(size)}
    pairs = []
    for piece, i in vocabulary.items():
        if processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i) or processor.is_unused(i):
            continue
        cuts = ((piece[:k], piece[k:]) for k in range(1, len(piece)))
        parts = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
        pairs += [
            (-processor.get_score(i), i, vocabulary[left], vocabulary[right], left, right) for left, right in parts
        ]
    return vocabulary, [(left, right) for *_, left, right in sorted(pairs)]


def _write_own(tokenizer: Tokenizer, folder: Path) -> Any:
    from pretrain.export.shipped.tokenization_sphere_pretrain import SpherePretrainTokenizer

    shutil.copyfile(tokenizer.file, folder / "tokenizer.model")
    shutil.copyfile(Path(__file__).parent / "shipped" / f"{_MODULE}.py", folder / f"{_MODULE}.py")
    settings = {
        **_special(tokenizer),
        "tokenizer_class": SpherePretrainTokenizer.__name__,
        "auto_map": {"AutoTokenizer": [f"{_MODULE}.{SpherePretrainTokenizer.__name__}", None]},
    }
    _write_json(folder / "tokenizer_config.json", settings)
    return SpherePretrainTokenizer.from_pretrained(folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
