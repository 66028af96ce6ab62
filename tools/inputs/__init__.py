"""Documents out of the files that people have, for tools.tokenizer and tools.shards alike.

* :func:`find_inputs` turns what the user named into files,
* :func:`raw_records` a file into raw records,
* :func:`parse` a raw record into a document or the reason why it is none,
* :class:`Account` keeps the books: records read are documents kept, duplicates, and the dropped of each kind.
"""

from tools.inputs.account import Account
from tools.inputs.add_arguments import add_input_arguments, reading_of
from tools.inputs.files import InputFile, find_inputs
from tools.inputs.formats import Format
from tools.inputs.progress import Progress
from tools.inputs.records import Fault, Raw, Reading, parse
from tools.inputs.stream import documents_in, raw_records, read_documents

__all__ = [
    "Account",
    "Fault",
    "Format",
    "InputFile",
    "Progress",
    "Raw",
    "Reading",
    "add_input_arguments",
    "documents_in",
    "find_inputs",
    "parse",
    "raw_records",
    "read_documents",
    "reading_of",
]
