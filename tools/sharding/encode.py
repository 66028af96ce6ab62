"""From raw records to tokens, in several processes; the results come in the order of the inputs."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tools.documents import Document, is_validation
from tools.inputs import Fault, InputFile, Raw, Reading, parse, raw_records
from tools.shard_writer import dtype_of
from tools.sharding.seen import Hashes, hashes_of

# Raw bytes that a process gets at a time: enough to hide the hand-over, little enough for many processes.
UNIT_BYTES = 2_000_000
_RECORD_BYTES = 100

Position = tuple[int, int]  # files that are done, and records of the next one


@dataclass(frozen=True)
class Unit:
    """Neighbouring records.

    Attributes:
        end: where the next unit begins.
        read: bytes of the inputs up to there, about.
        records: the records.
    """

    end: Position
    read: int
    records: list[Raw]


@dataclass(frozen=True)
class Encoded:
    """What became of a unit.

    Attributes:
        end: of the unit.
        read: of the unit.
        tokens: unsigned ``[sum of lengths]``, the documents one behind the other, each with its end.
        lengths: int64 ``[documents]``.
        validation: bool ``[documents]``.
        text_bytes: int64 ``[documents]``.
        hashes: bytes ``[documents]`` of the texts, where duplicates are to be left out.
        faults: of records that gave no document.
    """

    end: Position
    read: int
    tokens: npt.NDArray[np.unsignedinteger]
    lengths: npt.NDArray[np.int64]
    validation: npt.NDArray[np.bool_]
    text_bytes: npt.NDArray[np.int64]
    hashes: Hashes | None
    faults: list[Fault]


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How units are encoded; the same in every process.

    Attributes:
        tokenizer: file of the model.
        eod_id: as for :class:`~pretrain.data.tokenizer.Tokenizer`.
        reading: how records are parsed.
        validation_fraction: share of the documents for the validation split, by the hash of their text.
        hashed: whether hashes of the texts are wanted.
    """

    tokenizer: Path
    eod_id: int | None
    reading: Reading
    validation_fraction: float
    hashed: bool


def cut_units(files: Sequence[InputFile], reading: Reading, start: Position, unit_bytes: int) -> Iterator[Unit]:
    """All records from a position on, in units."""
    records: list[Raw] = []
    size = 0
    before = sum(file.size for file in files[: start[0]])
    for number, file in enumerate(files[start[0] :], start=start[0]):
        done = start[1] if number == start[0] else 0
        for count, (raw, place) in enumerate(raw_records(file.path, reading), start=1):
            if count <= done:
                continue
            records.append(raw)
            size += len(raw.content) + _RECORD_BYTES
            if size >= unit_bytes:
                yield Unit((number, count), before + place, records)
                records, size = [], 0
        before += file.size
    if records:
        yield Unit((len(files), 0), before, records)


class Encoder:
    """Encodes units, in this process."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._tokenizer = Tokenizer(encoding.tokenizer, encoding.eod_id)

    def encode(self, unit: Unit) -> Encoded:
        """Parse, encode and hash."""
        faults: list[Fault] = []
        texts: list[str] = []
        for raw in unit.records:
            parsed = parse(raw, self._encoding.reading)
            if isinstance(parsed, Document):
                texts.append(parsed.text)
            else:
                faults.append(parsed)
        fraction = self._encoding.validation_fraction
        contents = [text.encode("utf-8") for text in texts]
        tokens = self._tokenizer.encode_documents(texts)
        dtype = dtype_of(self._tokenizer.vocab_size)
        return Encoded(
            end=unit.end,
            read=unit.read,
            tokens=np.concatenate(tokens).astype(dtype) if tokens else np.zeros(0, dtype=dtype),
            lengths=np.array([len(each) for each in tokens], dtype=np.int64),
            validation=np.array([is_validation(text, fraction) for text in texts], dtype=bool),
            text_bytes=np.array([len(content) for content in contents], dtype=np.int64),
            hashes=hashes_of(contents) if self._encoding.hashed else None,
            faults=faults,
        )


def encode_units(units: Iterator[Unit], encoding: Encoding, workers: int) -> Iterator[Encoded]:
    """Encode units in ``workers`` processes, in this one when it is one; the order stays.

    No more than about two units a worker are in memory.

    Raises:
        UserError: a worker was killed, most likely for want of memory.
    """
    if workers == 1:
        yield from map(Encoder(encoding).encode, units)
        return
    # Spawned: a fork would copy whatever threads and locks this process has.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encoding,))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for unit in units:
            waiting.append(pool.submit(_encode_in_worker, unit))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, perhaps for want of memory: lower --workers or --max-document-bytes; "
            "the same command goes on from here"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_encoder: Encoder | None = None


def _start_worker(encoding: Encoding) -> None:
    global _worker_encoder
    # An interrupt at the terminal reaches all processes; the parent ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_encoder = Encoder(encoding)


def _end_with_parent() -> None:
    """A killed parent leaves its workers waiting for work for ever: end them."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(unit: Unit) -> Encoded:
    if _worker_encoder is None:
        raise RuntimeError("the worker was not started")
    return _worker_encoder.encode(unit)
