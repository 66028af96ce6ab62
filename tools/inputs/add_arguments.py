"""The command-line arguments that say what to read, the same for every tool."""

import argparse

from pretrain.data.text import MAX_DOCUMENT_BYTES
from tools.arguments import positive_int
from tools.inputs.formats import FORMATS
from tools.inputs.records import Reading


def add_input_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add ``--input``, which may be ``required``, and what belongs to it."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=required,
        metavar="F",
        help=f"files, folders or quoted glob patterns ('data/**/*.jsonl.gz') of {' '.join(FORMATS)}; a .tar is a "
        "WebDataset with members .txt or .json",
    )
    parser.add_argument(
        "--text-key",
        default="text",
        metavar="NAME",
        help="field of the JSON records and column of the parquet files with the text (default: text)",
    )
    parser.add_argument(
        "--lines", action="store_true", help="each line of a .txt file is a document (default: each file)"
    )
    parser.add_argument(
        "--max-document-bytes",
        type=positive_int,
        default=MAX_DOCUMENT_BYTES,
        metavar="N",
        help="drop and count longer documents (default: %(default)s)",
    )
    parser.add_argument("--strict", action="store_true", help="stop at the first bad input (default: drop and count)")


def reading_of(options: argparse.Namespace) -> Reading:
    """What the arguments say about reading."""
    return Reading(text_key=options.text_key, lines=options.lines, max_document_bytes=options.max_document_bytes)
