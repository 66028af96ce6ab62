"""The data of a sweep, built by the project's own tools in the same way each time."""

import fcntl
import hashlib
import json
import platform
import subprocess
import sys
from pathlib import Path

from pretrain.data.files import write_atomically
from pretrain.data.manifest import NO_TOKENIZER, Manifest, canonical_json, load_manifest
from pretrain.errors import UserError
from tools.sweep.grid import DataPart, Grid

RECIPE_NAME = "recipe.json"


def existing_data(grid: Grid) -> Manifest | None:
    """The data, if it is there, and as the grid says now if it was built for it."""
    if grid.file.data.manifest is not None:
        return load_manifest(grid.manifest) if grid.manifest.is_file() else None
    recipe = grid.file.work / "data" / RECIPE_NAME
    if not grid.manifest.is_file() or not recipe.is_file() or recipe.read_bytes() != _recipe(grid.file.data):
        return None
    return load_manifest(grid.manifest)


def samples_identity(manifest: Manifest) -> str:
    """sha256 over the tokenizer, the length and every shard: the same tokens in the same order, hex.

    Unlike the manifest's own fingerprint it stays when the manifest comes to say more about the same samples.
    """
    shards = {name: [shard.sha256 for shard in split.shards] for name, split in manifest.splits.items()}
    content = [manifest.sequence_length, manifest.tokenizer_sha256, shards]
    return hashlib.sha256(canonical_json(content)).hexdigest()


def tokenizer_of(manifest: Manifest) -> str:
    """What tells whether two data sets have the same tokens: the model's sha256, or the numbers of a foreign one."""
    if manifest.tokenizer_sha256 != NO_TOKENIZER:
        return manifest.tokenizer_sha256
    return f"{NO_TOKENIZER}, {manifest.vocab_size} tokens, {manifest.eod_id} ends"


def build_data(grid: Grid) -> Manifest:
    """The data, built if it is missing or was built otherwise; of several sweeps one builds and the others wait.

    Raises:
        UserError: a tool refused, or failed; or the data that should be there are not.
    """
    if grid.file.data.manifest is not None:
        if existing := existing_data(grid):
            return existing
        raise UserError(
            f"{grid.path}: data.manifest={grid.manifest} does not exist; build it as configs/paper/README.md says"
        )
    folder = grid.file.work / "data"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if existing := existing_data(grid):
            return existing
        (folder / RECIPE_NAME).unlink(missing_ok=True)
        for command in _commands(grid.file.data, folder):
            _call(command)
        write_atomically(folder / RECIPE_NAME, _recipe(grid.file.data))
    return load_manifest(grid.manifest)


def _recipe(data: DataPart) -> bytes:
    # The embedded text is that of the running Python.
    python = platform.python_version() if data.text is None else None
    return json.dumps(data.model_dump(mode="json", exclude={"manifest"}) | {"python": python}, indent=1).encode()


def _commands(data: DataPart, folder: Path) -> list[list[str]]:
    documents, tokenizer = str(folder / "documents.jsonl"), str(folder / "tokenizer.model")
    corpus = ["tools.corpus", "--out", str(folder)]
    if data.text is not None:
        corpus += ["--text", *map(str, data.text)]
    if data.max_bytes is not None:
        corpus += ["--max-bytes", str(data.max_bytes)]
    return [
        corpus,
        [
            *("tools.tokenizer", "train", "--input", documents, "--out", tokenizer),
            *("--vocab-size", str(data.vocab_size)),
        ],
        [
            *("tools.shards", "build", "--force", "--input", documents, "--tokenizer", tokenizer),
            *("--sequence-length", str(data.sequence_length), "--out", str(folder / "shards")),
            *("--validation-fraction", str(data.validation_fraction)),
        ],
    ]


def _call(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(f"{command[0]}: {last.removeprefix('error: ')}")
