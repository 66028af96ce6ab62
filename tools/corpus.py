"""Gather raw text into one file of documents: the user's own, or what every Python brings along.

``python -m tools.corpus --out DIR`` writes ``DIR/documents.jsonl``: a line ``{"text": ..., "source": ...}`` a document.
"""

import argparse
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path

from pretrain.data.files import partial_path, publish
from pretrain.errors import UserError, run_cli
from tools.arguments import positive_int
from tools.documents import Document, make_folder
from tools.inputs import Account, Fault, Format, Reading, documents_in

DOCUMENTS_NAME = "documents.jsonl"
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py"})

_TEXT = Format("text", "")

_PARAGRAPH_END = re.compile(r"(?:(?<=\n\n)|(?<=\n\r\n))(?![\r\n])")

# Installed packages are not the standard library's; tests are the least like written text.
_FOLDERS_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def embedded_documents(account: Account) -> Iterator[Document]:
    """CPython's documentation topics, then the modules of its standard library, in a fixed order; needs no download."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield Document(topics[name], f"pydoc_data.topics/{name}")
    library = Path(sysconfig.get_path("stdlib"))
    for path in _files_under(library, _FOLDERS_LEFT_OUT, account):
        # The topics again as one string literal, and a file that the build of this very Python generated.
        generated = path.parent.name == "pydoc_data" or path.name.startswith("_sysconfigdata")
        if path.suffix == ".py" and not generated:
            for document in documents_in(path, Reading(), account, _TEXT):
                yield Document(document.text, path.relative_to(library).as_posix())


def documents_of(paths: list[Path], account: Account) -> Iterator[Document]:
    """The documents of the user's files and folders; .jsonl gives one per line, any other file is one document.

    Of a folder, files of other types than ``TEXT_SUFFIXES`` and .jsonl are skipped; a file named by the user is read.
    """
    for path in paths:
        for file in _files_under(path, frozenset(), account) if path.is_dir() else [path]:
            if not file.is_file():
                account.drop(Fault(str(file), "no regular file"))
            elif file.suffix == ".jsonl":
                yield from documents_in(file, Reading(), account)
            elif file.suffix in TEXT_SUFFIXES or file == path:
                yield from documents_in(file, Reading(), account, _TEXT)
            else:
                account.drop(Fault(str(file), "not a text file type"))


def cut_document(document: Document, max_bytes: int) -> Iterator[Document]:
    """Parts of at most ``max_bytes`` bytes that end with a paragraph; a longer paragraph is a part of its own.

    One book is then many documents, some of which can be held out. Nothing of the text is lost.
    """
    part: list[str] = []
    size = number = 0
    for paragraph in _PARAGRAPH_END.split(document.text):
        length = len(paragraph.encode("utf-8"))
        if part and size + length > max_bytes:
            number += 1
            yield Document("".join(part), f"{document.source}#{number}")
            part, size = [], 0
        part.append(paragraph)
        size += length
    yield Document("".join(part), f"{document.source}#{number + 1}" if number else document.source)


def _files_under(folder: Path, left_out: frozenset[str], account: Account) -> Iterator[Path]:
    """All files in a fixed order; hidden folders, and those with a name in ``left_out``, are not entered."""

    def note(error: OSError) -> None:
        account.drop(Fault(str(error.filename), f"unreadable ({error.strerror})"))

    for current, folders, files in os.walk(folder, onerror=note):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in left_out)
        yield from (Path(current, name) for name in sorted(files))


def write_corpus(
    out: Path, text: list[Path] | None, max_bytes: int | None = None, max_document_bytes: int | None = None
) -> None:
    """Write ``out/documents.jsonl`` and print the counts.

    Args:
        out: folder, made if need be.
        text: files and folders; None for the embedded documents.
        max_bytes: of UTF-8 text; the first document that does not fit and all behind it are left out.
        max_document_bytes: longer documents are cut between paragraphs.

    Raises:
        UserError: a path does not exist, the output would be read as input, or no document was found.
    """
    for path in text or []:
        if not path.exists():
            raise UserError(f"text {path} does not exist")
        if path.is_dir() and out.resolve().is_relative_to(path.resolve()):
            raise UserError(f"output folder {out} lies inside the text folder {path}: choose one outside")
    make_folder(out)
    account = Account()
    documents = embedded_documents(account) if text is None else documents_of(text, account)
    if max_document_bytes is not None:
        documents = chain.from_iterable(cut_document(document, max_document_bytes) for document in documents)
    target = out / DOCUMENTS_NAME
    written = left_out = size = 0
    with partial_path(target).open("w", encoding="utf-8", newline="\n") as file:
        for document in documents:
            length = len(document.text.encode("utf-8"))
            if left_out or (max_bytes is not None and size + length > max_bytes):
                left_out += 1
                continue
            file.write(json.dumps({"text": document.text, "source": document.source}, ensure_ascii=False) + "\n")
            written += 1
            size += length
    account.report(out / "documents.dropped.txt")
    if not written:
        partial_path(target).unlink()
        reason = f"raise --max-bytes above {max_bytes}" if left_out else "name files or folders with text by --text"
        raise UserError(f"no document to write: {reason}")
    publish(target)
    if left_out:
        print(f"left out {left_out} documents beyond --max-bytes {max_bytes}")
    print(f"{target}: {written} documents, {size / 1e6:.2f} MB")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.corpus", description="Gather raw text into documents.jsonl.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write documents.jsonl to")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="your own text: files, or folders that are searched for .txt .md .rst .py, one document each, and .jsonl, "
        'one document in the "text" field of each line (default: CPython\'s documentation and standard library)',
    )
    parser.add_argument(
        "--max-bytes", type=positive_int, metavar="N", help="stop after N bytes of text (default: take all)"
    )
    parser.add_argument(
        "--max-document-bytes",
        type=positive_int,
        metavar="N",
        help="cut longer documents between paragraphs, so that a book is many documents (default: do not cut)",
    )
    options = parser.parse_args(arguments)
    write_corpus(options.out, options.text, options.max_bytes, options.max_document_bytes)


if __name__ == "__main__":
    run_cli(main)
