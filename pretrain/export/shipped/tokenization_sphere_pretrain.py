"""A sentencepiece model behind transformers' interface: the ids are sentencepiece's own, whatever the model."""

import shutil
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import PreTrainedTokenizer


class SpherePretrainTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Encodes text as sentencepiece does; what spells a control symbol in a text is text."""

    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012 # as transformers wants it
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str, **kwargs: Any) -> None:
        self.vocab_file = vocab_file
        self.processor = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        super().__init__(**{**kwargs, "clean_up_tokenization_spaces": False, "split_special_tokens": True})

    @property
    def vocab_size(self) -> int:
        """Pieces of the model."""
        return int(self.processor.get_piece_size())

    def get_vocab(self) -> dict[str, int]:
        """Piece -> id."""
        return {self.processor.id_to_piece(token): token for token in range(self.vocab_size)}

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """Pieces of the whole text: nothing is cut out of it beforehand."""
        pieces: list[str] = self.processor.encode(text, out_type=str)
        return pieces

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self.tokenize(text)

    def _convert_token_to_id(self, token: str) -> int:
        return int(self.processor.piece_to_id(token))

    def _convert_id_to_token(self, index: int) -> str:
        return str(self.processor.id_to_piece(index))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text that the pieces stand for."""
        return str(self.processor.decode_pieces(tokens))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Copy the sentencepiece model."""
        target = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}tokenizer.model"
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)
