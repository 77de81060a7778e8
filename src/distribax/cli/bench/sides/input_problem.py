"""The data of the input benchmarks, in NumPy alone: images in memory and in TFRecord files."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUM_IMAGES = 60_000
PIXELS = 784
BATCH_SIZE = 256

NUM_FILES = 10
RECORDS_PER_FILE = 10_000
RECORD_BYTES = 1 + PIXELS


def parser(*sources: str) -> argparse.ArgumentParser:
    """Arguments that all sides share; the first source is the default one."""
    result = argparse.ArgumentParser()
    result.add_argument("--replicas", type=int, default=2)
    result.add_argument("--source", choices=sources, default=sources[0])
    result.add_argument("--folder", type=Path, help="where the TFRecord files are")
    result.add_argument("--records", type=int, default=RECORDS_PER_FILE, help="per file")
    return result


def repeat(epoch: Iterable[Any]) -> Iterator[Any]:
    """Yields the batches of one epoch after the other."""
    while True:
        yield from epoch


def in_memory() -> tuple[np.ndarray, np.ndarray]:
    """Images as float32, labels as int32."""
    generator = np.random.default_rng(0)
    images = generator.random((NUM_IMAGES, PIXELS), np.float32)
    return images, generator.integers(0, 10, NUM_IMAGES).astype(np.int32)


def decode(record: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The Python work of a map: a label byte and 28 x 28 grey bytes become image and label."""
    values = np.frombuffer(record, np.uint8)
    return values[1:].reshape(28, 28).astype(np.float32) / np.float32(255), values[0].astype(
        np.int32
    )


def write_records(folder: Path, records_per_file: int = RECORDS_PER_FILE) -> list[str]:
    """Write the TFRecord files, unless they exist; return their names."""
    paths = [folder / f"images-{number:02}.tfrecord" for number in range(NUM_FILES)]
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(1)
    for path in paths:
        records = generator.integers(0, 256, (records_per_file, RECORD_BYTES)).astype(np.uint8)
        records[:, 0] %= 10
        if path.exists():
            continue
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(_frame(records).tobytes())
        unfinished.rename(path)
    return [str(path) for path in paths]


def _frame(records: np.ndarray) -> np.ndarray:
    """Records of equal length with TFRecord's frame: length, its checksum, data, its checksum."""
    count, size = records.shape
    length = np.tile(np.frombuffer(np.uint64(size).tobytes(), np.uint8), (count, 1))
    return np.concatenate(
        [length, _masked_checksums(length), records, _masked_checksums(records)], axis=1
    )


def _masked_checksums(rows: np.ndarray) -> np.ndarray:
    """CRC-32C of each row, masked as TFRecord does, as four bytes; all rows advance together."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    checksum = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in rows.T:
        checksum = table[(checksum ^ column) & 0xFF] ^ (checksum >> 8)
    checksum = ~checksum
    masked = ((checksum >> 15) | (checksum << 17)) + np.uint32(0xA282EAD8)
    return masked.astype("<u4").view(np.uint8).reshape(-1, 4)
