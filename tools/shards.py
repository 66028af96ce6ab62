"""Turn documents into the shards that a training reads, and check such shards.

``python -m tools.shards build --input F... --tokenizer M --sequence-length L --out DIR``; ``verify``, ``inspect``,
``merge``, ``import-megatron``, ``import-nanogpt`` and ``index`` are told by ``--help``.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from pretrain.data.manifest import DATASET_NAME, load_manifest
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError, run_cli
from tools.arguments import natural_int, positive_float, positive_int, proper_fraction
from tools.documents import VALIDATION_FRACTION, default_threads
from tools.inputs import add_input_arguments, reading_of
from tools.shard_writer import ShardLayout
from tools.sharding.adopt import Adoption, adopt
from tools.sharding.build import Building, build
from tools.sharding.megatron import GivenVocabulary, Import, import_megatron
from tools.sharding.merge import merge
from tools.sharding.nanogpt import GPT2, import_nanogpt
from tools.sharding.show import show
from tools.verify_shards import find_faults

__all__ = ["Building", "build", "main"]


def verify(place: Path | str) -> None:
    """Print one line per fault of a data set; UserError when there is any."""
    manifest = load_manifest(place)
    faults = 0
    for fault in find_faults(manifest):
        faults += 1
        print(fault)
    if faults:
        raise UserError(f"{faults} faults in {manifest.directory}: restore these files or build the shards anew")
    print(f"{manifest.directory} is sound: fingerprint {manifest.fingerprint}")


def _dataset_name(text: str) -> str:
    if not DATASET_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to 40 letters, digits, - or _")
    return text


def _add_target_arguments(command: argparse.ArgumentParser) -> None:
    """Where and how to write a data set."""
    command.add_argument(
        "--sequence-length", type=positive_int, required=True, metavar="L", help="longest sequence to train with"
    )
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the data set")
    command.add_argument("--name", type=_dataset_name, default="data", help="of the data set (default: data)")
    command.add_argument(
        "--validation-fraction",
        type=proper_fraction,
        default=VALIDATION_FRACTION,
        metavar="X",
        help="share of the documents held out (default: %(default)s)",
    )
    command.add_argument(
        "--samples-per-member", type=positive_int, default=128, metavar="N", help="default: %(default)s"
    )
    command.add_argument(
        "--members-per-shard", type=positive_int, default=256, metavar="N", help="default: %(default)s"
    )
    command.add_argument(
        "--deduplicate",
        action="store_true",
        help="leave out documents that are equal to an earlier one; takes 32 bytes of memory for each document",
    )
    command.add_argument(
        "--save-every",
        type=positive_float,
        default=10.0,
        metavar="SECONDS",
        help="how much work a kill can cost (default: %(default)s)",
    )
    command.add_argument("--force", action="store_true", help="replace a data set that is there already")


def _layout_of(options: argparse.Namespace) -> ShardLayout:
    return ShardLayout(
        name=options.name,
        sequence_length=options.sequence_length,
        samples_per_member=options.samples_per_member,
        members_per_shard=options.members_per_shard,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.shards", description="Make and check data sets.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="tokenize and pack documents into shards; goes on after a kill")
    add_input_arguments(command)
    command.add_argument("--tokenizer", type=Path, required=True, metavar="M", help="a sentencepiece model")
    command.add_argument(
        "--eod-id", type=natural_int, metavar="N", help="control symbol that ends documents (default: the model's </s>)"
    )
    _add_target_arguments(command)
    command.add_argument(
        "--workers",
        type=positive_int,
        default=default_threads(),
        metavar="N",
        help="processes that tokenize (default: the cores at hand); the shards do not depend on it",
    )
    command = commands.add_parser("verify", help="compare every byte with the manifest")
    command.add_argument("manifest", metavar="MANIFEST", help="manifest.json, or its folder")
    command = commands.add_parser("inspect", help="show what is in a data set")
    command.add_argument("manifest", metavar="MANIFEST", help="manifest.json, or its folder")
    command.add_argument("--samples", type=natural_int, default=2, metavar="N", help="of each split (default: 2)")
    command = commands.add_parser("merge", help="several data sets of one tokenizer and length as one")
    command.add_argument("manifests", nargs="+", metavar="MANIFEST", help="data sets, in this order")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the new data set")
    command.add_argument("--name", type=_dataset_name, default="data", help="of the data set (default: data)")
    command.add_argument("--copy", action="store_true", help="copy the tars (default: hard links where possible)")
    _add_import(commands.add_parser("import-megatron", help="shards from Megatron's .bin and .idx"))
    _add_nanogpt(commands.add_parser("import-nanogpt", help="shards from nanoGPT's .bin of uint16, GPT-2's tokens"))
    _add_index(commands.add_parser("index", help="side indices and a manifest for token shards that others wrote"))
    return parser


def _add_vocabulary_arguments(command: argparse.ArgumentParser) -> None:
    """The vocabulary of tokens that came from elsewhere."""
    command.add_argument("--tokenizer", type=Path, metavar="M", help="their sentencepiece model, if that is what it is")
    command.add_argument("--vocab-size", type=positive_int, metavar="N", help="without --tokenizer: of their tokenizer")
    command.add_argument("--eod-id", type=natural_int, metavar="N", help="token that ends documents")


def _vocabulary_of(options: argparse.Namespace) -> GivenVocabulary | Tokenizer:
    if options.tokenizer is not None:
        if options.vocab_size is not None:
            raise UserError("--vocab-size and --tokenizer exclude each other: the model knows its size")
        return Tokenizer(options.tokenizer, options.eod_id)
    if options.vocab_size is None or options.eod_id is None:
        raise UserError("give --tokenizer, or both --vocab-size and --eod-id")
    if options.eod_id >= options.vocab_size:
        raise UserError(f"--eod-id {options.eod_id} is outside the vocabulary of {options.vocab_size}")
    return GivenVocabulary(options.vocab_size, options.eod_id)


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument("prefix", type=Path, metavar="PREFIX", help="path of both files without .bin and .idx")
    _add_vocabulary_arguments(command)
    _add_target_arguments(command)
    command.add_argument("--strict", action="store_true", help="stop at the first bad document (default: drop, count)")


def _add_nanogpt(command: argparse.ArgumentParser) -> None:
    command.add_argument("train", type=Path, nargs="+", metavar="BIN", help="train.bin, one or several")
    command.add_argument(
        "--validation",
        type=Path,
        nargs="+",
        default=[],
        metavar="BIN",
        help="val.bin (default: a share of the documents)",
    )
    _add_vocabulary_arguments(command)
    _add_target_arguments(command)
    command.add_argument("--strict", action="store_true", help="stop at the first bad document (default: drop, count)")
    command.set_defaults(vocab_size=GPT2.vocab_size, eod_id=GPT2.eod_id)


def _add_index(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, metavar="FOLDER", help="of tars with members .npy of tokens")
    _add_vocabulary_arguments(command)
    command.add_argument("--out", type=Path, metavar="DIR", help="where to put links, indices and manifest (in FOLDER)")
    command.add_argument("--name", type=_dataset_name, default="data", help="of the data set (default: data)")
    command.add_argument(
        "--validation", nargs="+", default=[], metavar="GLOB", help="names of the tars held out (default: none)"
    )
    command.add_argument("--member", default=".npy", metavar="END", help="of the names of members (default: .npy)")


def _build(options: argparse.Namespace) -> None:
    build(
        Building(
            inputs=options.input,
            tokenizer=options.tokenizer,
            out=options.out,
            layout=_layout_of(options),
            validation_fraction=options.validation_fraction,
            reading=reading_of(options),
            eod_id=options.eod_id,
            deduplicate=options.deduplicate,
            strict=options.strict,
            workers=options.workers,
            force=options.force,
            save_seconds=options.save_every,
        )
    )


def _merge(options: argparse.Namespace) -> None:
    merge(options.manifests, options.out, options.name, options.copy)


def _import_of(options: argparse.Namespace) -> Import:
    return Import(
        vocabulary=_vocabulary_of(options),
        out=options.out,
        layout=_layout_of(options),
        validation_fraction=options.validation_fraction,
        deduplicate=options.deduplicate,
        strict=options.strict,
        force=options.force,
        save_seconds=options.save_every,
    )


def _import(options: argparse.Namespace) -> None:
    import_megatron(options.prefix, _import_of(options))


def _import_nanogpt(options: argparse.Namespace) -> None:
    import_nanogpt(options.train, options.validation, _import_of(options))


def _index(options: argparse.Namespace) -> None:
    adopt(
        Adoption(
            folder=options.folder,
            out=options.out,
            vocabulary=_vocabulary_of(options),
            validation=options.validation,
            extension=options.member,
            name=options.name,
        )
    )


_COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "build": _build,
    "verify": lambda options: verify(options.manifest),
    "inspect": lambda options: show(options.manifest, options.samples),
    "merge": _merge,
    "import-megatron": _import,
    "import-nanogpt": _import_nanogpt,
    "index": _index,
}


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    options = _parser().parse_args(arguments)
    try:
        _COMMANDS[options.command](options)
    except OSError as error:
        # A full disk, a folder that may not be written to, an input that went away.
        place = error.filename or getattr(options, "out", None) or getattr(options, "folder", options.command)
        raise UserError(f"{place}: {error.strerror or error}") from error


if __name__ == "__main__":
    run_cli(main)
