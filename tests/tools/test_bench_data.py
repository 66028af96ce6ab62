"""The benchmark `data`: that all contenders do the same work, and that its rows say what was measured."""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.manifest import load_manifest
from pretrain.data.shard_index import check_files
from tests.launch import launch
from tools.bench import data, data_parts, data_reading, data_tokenizing, pairs
from tools.bench.data_formats import Rows, write_ours
from tools.bench.data_readers import CONTENDERS, ours
from tools.bench.data_resume import first_batch, start_batches
from tools.bench.data_simulated import Simulation, row_without_crc, simulate
from tools.verify_shards import find_faults

ROWS = Rows(count=96, sequence_length=15, rows_per_shard=32)
BATCH = 8
PEERS = ("Megatron IndexedDataset", "webdataset")
MOSAIC = ("MosaicML StreamingDataset", "MosaicML LocalDataset")


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return parser.parse_args(given)


def flip_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_all_contenders_read_the_same_samples_each_once_an_epoch(tmp_path: Path) -> None:
    written = np.concatenate(list(ROWS.chunks())).astype(np.int64)
    assert written.shape == (96, 16)
    np.testing.assert_array_equal(written[1:, 0], written[:-1, -1])
    readers, missing = data_reading.start_readers(tmp_path, ROWS, BATCH)
    assert {*readers, *missing} == set(CONTENDERS)
    assert {"ours", *PEERS} <= set(readers)
    for name, batches in readers.items():
        for _ in range(2):
            epoch = list(itertools.islice(batches, ROWS.count // BATCH))
            assert {(batch.dtype, batch.shape) for batch in epoch} == {(np.dtype(np.int64), (BATCH, 16))}, name
            read = np.concatenate(epoch)
            assert not np.array_equal(read, written), f"{name} is not shuffled"
            np.testing.assert_array_equal(np.unique(read, axis=0), np.unique(written, axis=0), err_msg=name)


def test_ours_compares_what_it_reads_with_its_crc32(tmp_path: Path) -> None:
    write_ours(tmp_path / "ours", ROWS)
    flip_byte(tmp_path / "ours" / "bench-train-000001.tar", 1000)
    with pytest.raises(RuntimeError, match="not what had been written"):
        list(itertools.islice(ours(tmp_path / "ours", ROWS, BATCH), ROWS.count // BATCH))


def test_a_peer_that_is_not_installed_has_an_empty_row_and_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "streaming", None)  # importing it raises an ImportError
    small = arguments("--samples", "64", "--sequence-length", "15", "--rounds", "2", "--batch", "8")
    section = data_reading.measure(small, tmp_path)
    lines = section.text.splitlines()
    for name in MOSAIC:
        assert name in [line.strip() for line in lines]
        assert sum(line.startswith(f"{name} is not measured: ") for line in lines) == 1
        assert section.results["contenders"][name] is None
    for name in ("ours", *PEERS):
        (row,) = [line for line in lines if line.startswith(name)]
        found = section.results["contenders"][name]
        assert len(found["rounds"]) == 2
        assert f"{found['ours_over_it']['median']:.2f}" in row


def test_a_row_is_tokens_over_cpu_seconds_and_the_ratio_of_the_same_round() -> None:
    timings = {
        "ours": [pairs.Timing(wall=5.0, cpu=1.0), pairs.Timing(wall=5.0, cpu=2.0), pairs.Timing(wall=5.0, cpu=4.0)],
        "webdataset": [pairs.Timing(wall=9.0, cpu=c) for c in (3.0, 16.0, 16.0)],
    }
    found = data_reading.describe(ROWS, BATCH, 1000, timings, {}).results["contenders"]
    assert found["ours"]["mtokens_per_cpu_s"]["median"] == pytest.approx(8 * 1000 * 16 / 2.0 / 1e6)
    assert found["webdataset"]["ours_over_it"]["median"] == 4.0
    assert found["ours"]["cpu_over_wall"] == pytest.approx(0.4)


def test_a_simulated_data_set_stands_every_check(tmp_path: Path) -> None:
    simulation = Simulation(samples=70, sequence_length=15, rows_per_member=4, members_per_shard=8)
    simulate(tmp_path, simulation)
    manifest = load_manifest(tmp_path)
    check_files(manifest)
    assert list(find_faults(manifest)) == []
    split = manifest.split("train")
    assert (len(split.shards), split.samples) == (3, 96)
    rows = first_batch(manifest, 64, 32)
    assert rows.sound.all()
    np.testing.assert_array_equal(rows.tokens, np.broadcast_to(row_without_crc(16), (32, 16)))
    flip_byte(tmp_path / split.shards[0].file, 700)  # all shards are links to it
    damaged = ~first_batch(manifest, 0, 96).sound
    assert np.count_nonzero(damaged) == 3


def test_the_first_batch_is_the_one_that_an_uninterrupted_run_reads(tmp_path: Path) -> None:
    write_ours(tmp_path / "ours", ROWS)
    manifest = load_manifest(tmp_path / "ours")
    run = start_batches(manifest, BATCH)
    walked = [run.read(np.arange(start, start + BATCH)).tokens for start in range(0, 96, BATCH)]
    for start in (0, 40, 88):
        np.testing.assert_array_equal(first_batch(manifest, start, BATCH).tokens, walked[start // BATCH])


def test_growth_is_what_is_held_and_the_peak_what_was() -> None:
    assert launch("tests.tools.growth_worker", 1) == ["all as it should be\n"]


def test_all_ways_to_tokenize_give_the_same_tokens(tmp_path: Path) -> None:
    documents, model = data_tokenizing.prepare(tmp_path, 100_000)
    results = {name: turn() for name, turn in data_tokenizing.contenders(documents, model).items()}
    raw = results[data_tokenizing.RAW]
    assert [ids.tolist() for ids in raw] == results[data_tokenizing.RAW_LISTS]
    units = results[data_tokenizing.OURS]
    assert [length for unit in units for length in unit.lengths] == [len(ids) + 1 for ids in raw]
    eod = units[0].tokens[-1]
    packed = np.concatenate([unit.tokens for unit in units])
    np.testing.assert_array_equal(packed[packed != eod], np.concatenate(raw))


def test_every_part_runs_and_its_files_are_removed(tmp_path: Path) -> None:
    small = arguments(
        *("--only", "resume", "memory", "tokenizing", "building", "--folder", str(tmp_path), "--rounds", "1"),
        *("--sequence-length", "15", "--resume-samples", "40000", "--memory-samples", "40000"),
        *("--text-bytes", "100000", "--batch", "4"),
    )
    report = data_parts.run(small)
    assert list(report.results) == ["resume", "memory", "tokenizing", "building"]
    assert list(tmp_path.iterdir()) == []
    growth = report.results["memory"]["growth"]
    assert growth["manifest"]["held"] <= growth["manifest and reading"]["held"]
    assert f"{growth['manifest']['peak'] / 2**20:.0f}" in report.text
    assert report.settings["versions"]["webdataset"] in report.text
    assert "1 processes" in report.text
    assert "2 processes" in report.text
