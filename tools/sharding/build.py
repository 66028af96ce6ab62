"""Building a data set from text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pretrain.data.manifest import Manifest
from pretrain.data.tokenizer import Tokenizer
from tools.documents import VALIDATION_FRACTION, make_folder
from tools.inputs import InputFile, Progress, Reading, find_inputs
from tools.shard_writer import ShardLayout
from tools.sharding.description import print_summary
from tools.sharding.encode import UNIT_BYTES, Encoding, cut_units, encode_units
from tools.sharding.pack import Packing, Recipe, Target, finished, shard_pattern, sole_builder


@dataclass(frozen=True, kw_only=True)
class Building:
    """What to build.

    Attributes:
        inputs: files, folders and glob patterns.
        tokenizer: a sentencepiece model; a copy goes beside the shards.
        out: folder of the data set, made if need be.
        layout: of the shards.
        validation_fraction: of the documents, by the hash of their text.
        reading: how the inputs are read.
        eod_id: control symbol that ends documents; None takes the model's end of a sentence.
        deduplicate: leave out every document whose text was there before.
        strict: stop at the first bad input.
        workers: processes that encode; the result does not depend on it.
        force: replace a data set that is in ``out`` already.
        save_seconds: between the states that an interrupted build goes on from.
        unit_bytes: of input that a process gets at a time; the result does not depend on it.
    """

    inputs: Sequence[Path | str]
    tokenizer: Path
    out: Path
    layout: ShardLayout
    validation_fraction: float = VALIDATION_FRACTION
    reading: Reading = field(default_factory=Reading)
    eod_id: int | None = None
    deduplicate: bool = False
    strict: bool = False
    workers: int = 1
    force: bool = False
    save_seconds: float = 10.0
    unit_bytes: int = UNIT_BYTES


def build(building: Building) -> Manifest:
    """Tokenize, pack and write a data set; the same inputs and settings give the same bytes.

    A build that was interrupted, by whatever, goes on when it is called again.

    Raises:
        UserError: an input or the tokenizer is unusable, ``out`` holds another data set, or a split gets no sample.
    """
    files = find_inputs(building.inputs, lambda path: _is_output(building, path))
    tokenizer = Tokenizer(building.tokenizer, building.eod_id)
    make_folder(building.out)
    target = Target(
        out=building.out,
        layout=building.layout,
        vocabulary=tokenizer,
        tokenizer=building.tokenizer,
        recipe=_recipe(building, files, tokenizer),
        force=building.force,
        strict=building.strict,
        deduplicate=building.deduplicate,
        save_seconds=building.save_seconds,
    )
    with sole_builder(building.out):
        manifest = finished(target) or _pack(building, files, target)
    print_summary(manifest)
    return manifest


def _pack(building: Building, files: list[InputFile], target: Target) -> Manifest:
    packing = Packing(target)
    if packing.position != (0, 0):
        print(f"going on after {packing.account.records} records of an interrupted build")
    total = sum(file.size for file in files)
    progress = Progress("building", total, done=packing.read)
    before = packing.account.text_bytes
    encoding = Encoding(
        tokenizer=building.tokenizer,
        eod_id=building.eod_id,
        reading=building.reading,
        validation_fraction=building.validation_fraction,
        hashed=building.deduplicate,
    )
    # More processes than units would start for nothing.
    workers = max(1, min(building.workers, (total - packing.read) // building.unit_bytes))
    try:
        units = cut_units(files, building.reading, packing.position, building.unit_bytes)
        for encoded in encode_units(units, encoding, workers):
            packing.take(encoded)
            progress.tell(packing.account.documents, packing.account.text_bytes - before, packing.read)
        progress.end()
        return packing.finish()
    except BaseException:
        progress.end()
        packing.close()
        raise


def _is_output(building: Building, path: Path) -> bool:
    """Whether a file is one that this build, or an earlier one of its name, writes beside its shards."""
    if path.parent.resolve() != building.out.resolve():
        return False
    name = building.layout.name
    return path.name == f"{name}.dropped.txt" or bool(shard_pattern({name}).fullmatch(path.name))


def _recipe(building: Building, files: list[InputFile], tokenizer: Tokenizer) -> Recipe:
    return {
        "tokenizer": tokenizer.sha256,
        "eod_id": tokenizer.eod_id,
        **asdict(building.layout),
        "validation_fraction": building.validation_fraction,
        **asdict(building.reading),
        "deduplicate": building.deduplicate,
        "inputs": [[str(file.path), file.size, file.changed] for file in files],
    }
