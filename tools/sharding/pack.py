"""Packing encoded documents into a data set, in a way that a kill at any moment can be gone on from.

Beside the shards lies ``<name>.build.json`` with everything that packing knows, saved now and then by a rename; what
was written to shards after it is cut off again on restart. A build depends on its inputs alone, so it ends in the same
bytes.
"""

import contextlib
import fcntl
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.files import write_atomically
from pretrain.data.manifest import (
    DATASET_NAME,
    MANIFEST_NAME,
    SPLITS,
    Manifest,
    Statistics,
    load_manifest,
    read_json,
)
from pretrain.errors import UserError
from tools.inputs import Account
from tools.shard_writer import ShardLayout, SplitWriter, Vocabulary, dtype_of
from tools.sharding.description import PackedData, PackedSplit, spare_tokenizer, write_manifest
from tools.sharding.encode import Encoded, Position
from tools.sharding.seen import SeenTexts

Recipe = dict[str, Any]  # JSON values: everything that the bytes of a data set depend on


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where and how a data set is written.

    Attributes:
        out: its folder.
        layout: of the shards.
        vocabulary: of the tokens.
        tokenizer: the model to be copied beside the shards, if there is one.
        recipe: what a build must have in common with an interrupted one to go on from it.
        force: replace what is there, and go on from nothing.
        strict: stop at the first bad input.
        deduplicate: leave out documents whose hash was there before.
        save_seconds: between two saved states.
    """

    out: Path
    layout: ShardLayout
    vocabulary: Vocabulary
    tokenizer: Path | None
    recipe: Recipe
    force: bool = False
    strict: bool = False
    deduplicate: bool = False
    save_seconds: float = 10.0

    @property
    def state_file(self) -> Path:
        """Where the state of an unfinished build lies."""
        return self.out / f"{self.layout.name}.build.json"

    @property
    def hashes_file(self) -> Path:
        """Where the hashes of an unfinished build lie."""
        return self.out / f"{self.layout.name}.build.hashes"


class Packing:
    """A data set in the making.

    Attributes:
        account: of the records so far.
        position: where the next unit begins.
        read: bytes of the inputs that were read so far.
    """

    def __init__(self, target: Target) -> None:
        """Begin, or go on where an interrupted build with the same recipe was.

        Raises:
            UserError: the folder holds a finished data set or an unfinished one of another recipe.
        """
        self._target = target
        self.account = Account(strict=target.strict)
        self.position: Position = (0, 0)
        self.read = 0
        self._writers = {split: SplitWriter(target.out, split, target.layout, target.vocabulary) for split in SPLITS}
        state = _usable_state(target)
        if state is not None:
            self._restore(state)
        self._seen = SeenTexts(target.hashes_file, state["hashes"] if state else 0) if target.deduplicate else None
        self._saved = time.monotonic()
        if state is None:
            self.save()

    def take(self, encoded: Encoded) -> None:
        """Pack a unit, and save the state if that is due."""
        for fault in encoded.faults:
            self.account.drop(fault)
        kept = np.ones(len(encoded.lengths), dtype=bool)
        if self._seen is not None and encoded.hashes is not None and len(kept):
            kept = self._seen.add(encoded.hashes)
        self.account.repeat(int(np.count_nonzero(~kept)))
        self.account.keep(int(encoded.text_bytes[kept].sum()), int(np.count_nonzero(kept)))
        for split, writer in self._writers.items():
            chosen = kept & (encoded.validation == (split == "validation"))
            if chosen.any():
                writer.add(encoded.tokens[np.repeat(chosen, encoded.lengths)], int(np.count_nonzero(chosen)))
        self.position, self.read = encoded.end, encoded.read
        if time.monotonic() - self._saved >= self._target.save_seconds:
            self.save()

    def save(self) -> None:
        """Bring the state to disk."""
        account = self.account
        state = {
            "recipe": self._target.recipe,
            "position": self.position,
            "read": self.read,
            "records": account.records,
            "documents": account.documents,
            "duplicates": account.duplicates,
            "dropped": account.dropped,
            "text_bytes": account.text_bytes,
            "listed": account.listed,
            "hashes": self._seen.save() if self._seen is not None else 0,
            "writers": {split: writer.state() for split, writer in self._writers.items()},
        }
        write_atomically(self._target.state_file, json.dumps(state).encode("ascii"))
        self._saved = time.monotonic()

    def finish(self) -> Manifest:
        """Complete the last shards and write the manifest; UserError when a split got no sample."""
        self.save()
        for writer in self._writers.values():
            writer.finish()
        if self._seen is not None:
            self._seen.close()
        self.account.report(self._target.out / f"{self._target.layout.name}.dropped.txt")
        try:
            _require_samples(self._writers, self._target.layout.sequence_length)
        except UserError:
            _remove(self._target)
            raise
        manifest = write_manifest(self._target.out, self._describe())
        _remove_state(self._target)
        return manifest

    def close(self) -> None:
        """Close all files and leave everything as it is, to be gone on with."""
        for writer in self._writers.values():
            writer.close()
        if self._seen is not None:
            self._seen.close()

    def _restore(self, state: dict[str, Any]) -> None:
        account = self.account
        account.records, account.documents = state["records"], state["documents"]
        account.duplicates, account.text_bytes = state["duplicates"], state["text_bytes"]
        account.dropped, account.listed = Counter(state["dropped"]), state["listed"]
        first, second = state["position"]
        self.position, self.read = (first, second), state["read"]
        for split, writer in self._writers.items():
            writer.restore(state["writers"][split])

    def _describe(self) -> PackedData:
        target, account = self._target, self.account
        tokens = sum(writer.received_tokens for writer in self._writers.values())
        return PackedData(
            name=target.layout.name,
            sequence_length=target.layout.sequence_length,
            vocab_size=target.vocabulary.vocab_size,
            eod_id=target.vocabulary.eod_id,
            dtype=dtype_of(target.vocabulary.vocab_size),
            tokenizer=target.tokenizer,
            tokenizer_sha256=target.vocabulary.sha256,
            splits={
                split: PackedSplit(
                    documents=writer.documents,
                    samples=writer.samples,
                    dropped_tokens=writer.dropped_tokens,
                    token_counts=writer.token_counts,
                    shards=tuple(writer.shards),
                )
                for split, writer in self._writers.items()
            },
            statistics=Statistics(
                records=account.records,
                documents=account.documents,
                duplicates=account.duplicates,
                dropped=dict(sorted(account.dropped.items())),
                text_bytes=account.text_bytes,
                document_tokens=tokens,
                bytes_per_token=round(account.text_bytes / tokens, 4) if account.text_bytes else None,
            ),
        )


@contextlib.contextmanager
def sole_builder(out: Path) -> Iterator[None]:
    """Keep other builds out of a folder; UserError when one is at work in it."""
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another build is at work in {out}: wait for it, or choose another --out") from None
        yield
    finally:
        os.close(folder)


def finished(target: Target) -> Manifest | None:
    """The data set, if a build of the same recipe was killed after its last step."""
    manifest = target.out / MANIFEST_NAME
    if target.force or not manifest.exists() or not target.state_file.exists():
        return None
    if read_json(target.state_file, "state of an interrupted build").get("recipe") != _as_json(target.recipe):
        return None
    _remove_state(target)
    return load_manifest(manifest)


def _usable_state(target: Target) -> dict[str, Any] | None:
    """The state to go on from, None to begin; refuses to write over other work, or removes it by force."""
    manifest = target.out / MANIFEST_NAME
    if target.force:
        _remove(target)
        return None
    if manifest.exists():
        raise UserError(f"{manifest} exists: choose another --out, or replace that data set by --force")
    spare_tokenizer(target.out, target.tokenizer, target.vocabulary.sha256)
    if target.state_file.exists():
        state: dict[str, Any] = read_json(target.state_file, "state of an interrupted build")
        difference = _difference(state["recipe"], _as_json(target.recipe))
        if difference:
            raise UserError(
                f"{target.out} holds an unfinished build with {difference}: finish that one by its own command, "
                "choose another --out, or start anew by --force"
            )
        return state
    ours = _shards_in(target)
    if ours:
        raise UserError(
            f"{target.out} holds shards such as {min(ours).name} but no manifest: "
            "choose another --out, or replace them by --force"
        )
    return None


def _as_json(recipe: Recipe) -> Recipe:
    again: Recipe = json.loads(json.dumps(recipe))
    return again


def _difference(there: Recipe, here: Recipe) -> str:
    """The first thing in which two recipes differ; empty when they agree."""
    for key in here:
        if there.get(key) != here[key]:
            if key == "inputs":
                changed = next((file for file in here[key] if file not in there[key]), None)
                return f"other inputs{f' ({changed[0]} is new or was changed)' if changed else ''}"
            return f"{key.replace('_', ' ')} {there.get(key)!r} instead of {here[key]!r}"
    return ""


def shard_pattern(names: set[str]) -> re.Pattern[str]:
    """What the names of the shards and indices of these data sets look like, partial ones too."""
    return re.compile(rf"({'|'.join(names)})-({'|'.join(SPLITS)})-\d{{6}}\.(tar|idx|idx\.json)(\.tmp)?")


def shards_in(out: Path, names: set[str]) -> set[Path]:
    """The shards and indices in a folder, partial ones too, of data sets of these names."""
    pattern = shard_pattern(names)
    return {path for path in out.iterdir() if pattern.fullmatch(path.name)}


def _shards_in(target: Target) -> set[Path]:
    """Those of the data set to be written and of the one that is there."""
    return shards_in(target.out, {target.layout.name} | _name_in(target.out / MANIFEST_NAME))


def _name_in(manifest: Path) -> set[str]:
    """The name in an old manifest, which may be damaged and name nothing."""
    if not manifest.exists():
        return set()
    try:
        content = json.loads(manifest.read_bytes())
    except ValueError:
        return set()
    name = content.get("name") if isinstance(content, dict) else None
    return {name} if isinstance(name, str) and DATASET_NAME.fullmatch(name) else set()


def _remove(target: Target) -> None:
    """Remove a data set, finished or not: the manifest first."""
    ours = _shards_in(target)
    (target.out / MANIFEST_NAME).unlink(missing_ok=True)
    _remove_state(target)
    for path in ours:
        path.unlink()


def _remove_state(target: Target) -> None:
    # The state last: while it is there, a build that is killed here knows what is left to be done.
    target.hashes_file.unlink(missing_ok=True)
    target.state_file.unlink(missing_ok=True)


def _require_samples(writers: dict[str, SplitWriter], sequence_length: int) -> None:
    """UserError when a split got no sample."""
    remedy = {"train": "lower --validation-fraction", "validation": "raise --validation-fraction"}
    for split, writer in writers.items():
        if not writer.samples:
            raise UserError(
                f"the {split} split has {writer.documents} documents with {writer.dropped_tokens} tokens, too few for "
                f"one sample of {sequence_length + 1}: {remedy[split]}, lower --sequence-length, "
                "or give more documents (tools.corpus --max-document-bytes makes many of a long one)"
            )
