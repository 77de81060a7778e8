"""Parsers of what comes from files, sockets and the environment, given anything at all.

Each ends with a result or with an error of ours that names the problem; never with another
exception, and never after allocating what a few bytes merely claim. Those of snapshots and of the
meeting of workers are in test_snapshot_safety.py and test_meeting_safety.py, those of TF_CONFIG,
Slurm's and JAX's variables beside their resolvers.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import distribax as dx
from distribax.cluster.environment_variables import read_integer, read_seconds
from distribax.cluster.peers import cluster_secret
from distribax.cluster.resolvers.slurm.host_lists import expand_hostlist, expand_tasks_per_node
from distribax.cluster.spec.address import parse_address
from distribax.data import Dataset
from distribax.data.formats import element_codec
from distribax.data.formats.csv_text import CsvColumn, CsvDialect, CsvParser, infer_column
from distribax.data.formats.example import (
    FixedLenFeature,
    VarLenFeature,
    parse_single_example,
    serialize_example,
)
from distribax.data.formats.record_format import CorruptRecordError, FileOpening
from distribax.data.formats.tfrecord import TFRecordFormat, TFRecordWriter, masked_crc32c
from distribax.parameter_server.protocol import handshake, wire
from distribax.training.checkpoints import checkpoint_files

few = settings(max_examples=25, suppress_health_check=list(HealthCheck))

_DEEP = st.sampled_from([b"[" * 60_000, b'{"a":' * 20_000])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def damaged(good: bytes) -> st.SearchStrategy[bytes]:
    """Returns a file with some bytes replaced, or something else."""
    changed = st.tuples(st.integers(0, len(good)), st.integers(0, 8), st.binary(max_size=8)).map(
        lambda cut: good[: cut[0]] + cut[2] + good[cut[0] + cut[1] :]
    )
    return changed | st.binary(max_size=100) | _DEEP


@pytest.fixture(scope="module", autouse=True)
def _memory_is_bounded() -> Iterator[None]:
    """Lets allocations fail that are much larger than what these tests need."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# Sockets.


def _receive(data: bytes, receive: Callable[[socket.socket], object]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(60)
        ours.settimeout(60)
        # More than the kernel buffers is no use to a test in one thread.
        theirs.sendall(data[:100_000])
        theirs.shutdown(socket.SHUT_WR)
        receive(ours)


def _make_frame(header: bytes, payload: int, magic: bytes = b"dxp3") -> bytes:
    return struct.pack("<4sIQQ", magic, len(header), payload, 0) + header


def _pack(header: object) -> bytes:
    # What MessagePack has no number for becomes a float.
    packed: bytes = msgpack.packb(header, default=float, unicode_errors="surrogatepass")
    return packed


_DTYPES = st.sampled_from(["int32", "bfloat16", "O", "V8", "S", "no", "M8", "f8,f8"]) | _JSON
_HEADERS = _JSON.map(_pack) | st.lists(
    st.tuples(_DTYPES, st.lists(st.integers(-2, 2**40), max_size=3) | _JSON), max_size=3
).map(lambda arrays: _pack({"do": "push", "arrays": arrays}))

_NESTED = st.sampled_from([b"\x91" * 60_000, b"\x81\xa1a" * 20_000])


@few
@given(
    st.builds(_make_frame, _HEADERS | st.binary(max_size=50) | _NESTED, st.integers(0, 2**41))
    | st.binary(max_size=60)
)
def test_frames(data: bytes) -> None:
    with contextlib.suppress(wire.FrameError, EOFError):
        _receive(data, wire.receive)


@few
@given(st.binary(max_size=150), st.booleans())
def test_handshakes(data: bytes, is_greeted: bool) -> None:
    for side in (handshake.welcome, handshake.introduce):
        said = b"distribax-parameters-2\n" * is_greeted + data
        with pytest.raises((handshake.WrongTokenError, ConnectionError)):
            _receive(said, lambda ours, side=side: side(ours, b"token"))


# Files.


def _read_records(path: Path, opening: FileOpening) -> list[bytes]:
    reader = TFRecordFormat(opening).open(str(path))
    try:
        return list(reader)
    finally:
        reader.close()


@few
@given(st.data(), st.sampled_from([None, "GZIP", "ZLIB"]))
def test_tfrecord_files(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, compression: str | None
) -> None:
    path = tmp_path_factory.mktemp("records") / "file"
    with TFRecordWriter(str(path), compression) as writer:
        writer.write(b"one")
        writer.write(b"another")
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    with contextlib.suppress(CorruptRecordError):
        _read_records(path, FileOpening(compression))


@pytest.mark.parametrize("length", [2**40, 2**63 - 1, 2**64 - 1])
def test_record_length_that_cannot_be_is_not_allocated(tmp_path: Path, length: int) -> None:
    size = struct.pack("<Q", length)
    path = tmp_path / "file"
    path.write_bytes(size + struct.pack("<I", masked_crc32c(size)) + b"a few bytes")
    with pytest.raises(CorruptRecordError, match="record cut short"):
        _read_records(path, FileOpening())


_FEATURES = {
    "text": FixedLenFeature([], bytes, ""),
    "number": VarLenFeature(np.int64),
    "pixels": VarLenFeature(np.float32),
}
_EXAMPLE = serialize_example({"text": "a", "number": [1, -1, 2**40], "pixels": [0.5, 1.5]})


@few
@given(damaged(_EXAMPLE))
def test_examples(record: bytes) -> None:
    with contextlib.suppress(ValueError, TypeError):  # The latter names a feature's type.
        parse_single_example(record, _FEATURES)


def test_numbers_of_examples_have_64_bits() -> None:
    with pytest.raises(ValueError, match="is not a serialized"):
        parse_single_example(b"\x0a" + b"\xff" * 100_000, _FEATURES)


@few
@given(
    st.binary(max_size=60) | st.text(st.sampled_from('ab1",.\n\r\0-e'), max_size=40).map(str.encode)
)
def test_csv_lines(line: bytes) -> None:
    columns = (CsvColumn.parse(np.int32), CsvColumn.parse(1.0), CsvColumn.parse(""))
    for quoted in (True, False):
        dialect = CsvDialect(use_quote_delim=quoted)
        with contextlib.suppress(ValueError):
            CsvParser(columns, dialect)(line)
        with contextlib.suppress(ValueError):
            infer_column(dialect.cut(line), dialect)


def test_long_csv_fields_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="is not CSV: field larger"):
        CsvDialect().cut(b"x" * 200_000)


_ELEMENT = element_codec.encode(
    {"a": (np.arange(3), np.array([b"x", b"yz"], object)), "b": np.float32(1)}
)
_ENTRIES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "shape": st.lists(st.integers(-2, 2**40), max_size=3) | _JSON,
            "dtype": _DTYPES,
            "bytes": st.integers(-9, 2**40) | _JSON,
            "texts": st.lists(st.integers(-9, 2**40), max_size=3) | _JSON,
            "scalar": st.booleans(),
        },
    ),
    max_size=2,
)
_STRUCTURES = st.sampled_from(
    [
        None,
        [None],
        [],
        {"keys": ["a"], "parts": [None]},
        {"name": "N", "fields": ["a"], "parts": [None]},
    ]
)


def _make_record(structure: object, entries: object) -> bytes:
    header = json.dumps({"structure": structure, "leaves": entries}).encode()
    return struct.pack("<Q", len(header)) + header + b"payload!" * 4


@few
@given(damaged(_ELEMENT) | st.builds(_make_record, _STRUCTURES | _JSON, _ENTRIES | _JSON))
def test_elements_in_files(record: bytes) -> None:
    with contextlib.suppress(ValueError):
        element_codec.decode(record)


@few
@given(_JSON.map(lambda v: json.dumps(v).encode()) | st.binary(max_size=50) | _DEEP)
def test_catalogues_of_saved_data_sets(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("saved")
    (folder / "catalogue.json").write_bytes(content)
    with pytest.raises(ValueError, match="path="):
        Dataset.load(str(folder))


def test_catalogue_names_files_of_its_own_folder_only(tmp_path: Path) -> None:
    secret, folder = tmp_path / "elsewhere", tmp_path / "saved"
    Dataset.range(2).save(str(folder))
    catalogue = json.loads((folder / "catalogue.json").read_text())
    (folder / catalogue["files"][0]).rename(secret)
    catalogue["files"] = ["../elsewhere"]
    (folder / "catalogue.json").write_text(json.dumps(catalogue))
    with pytest.raises(FileNotFoundError, match="saved/elsewhere"):
        list(Dataset.load(str(folder)))


def test_record_of_a_saved_data_set_that_is_no_element_is_named(tmp_path: Path) -> None:
    Dataset.range(2).save(str(tmp_path))
    (name,) = json.loads((tmp_path / "catalogue.json").read_text())["files"]
    with TFRecordWriter(str(tmp_path / name), "GZIP" if name.endswith("gz") else None) as writer:
        writer.write(b"no element")
    with pytest.raises(CorruptRecordError, match="not an element"):
        list(Dataset.load(str(tmp_path)))


def test_cache_holds_no_pickles(tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "cache"
    with TFRecordWriter(str(path)) as writer:
        writer.write(b"cposix\nmkdir\n(V" + os.fsencode(mark) + b"\ntR.")
    with pytest.raises(
        ValueError, match=r"record 0 of the cache is not an element.*Delete the file"
    ):
        list(Dataset.range(3).cache(str(path)))
    assert not mark.exists()


@few
@given(_JSON.map(lambda v: json.dumps(v).encode()) | st.binary(max_size=50) | _DEEP)
def test_notes_of_checkpoints(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    notes = folder / "ckpt-1" / checkpoint_files._NOTES
    notes.mkdir(parents=True)
    (notes.parent / checkpoint_files._MARKER).write_text("{}")
    (notes / "metadata").write_bytes(content)
    assert dx.train.latest_checkpoint(folder) == str(notes.parent)


# The environment.


@few
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20))
def test_numbers_addresses_and_host_lists(text: str) -> None:
    def read_variable(read: Callable[[], object]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DISTRIBAX_TEST_VARIABLE", text)
            patch.setenv(cluster_secret.SECRET_VARIABLE, text)
            return read()

    for parse in (
        lambda: read_variable(lambda: read_integer("DISTRIBAX_TEST_VARIABLE")),
        lambda: read_variable(lambda: read_seconds("DISTRIBAX_TEST_VARIABLE", 1.0)),
        lambda: read_variable(cluster_secret.find_secret),
        lambda: parse_address(text, "text"),
        lambda: expand_hostlist(text),
        lambda: expand_tasks_per_node(text),
    ):
        with contextlib.suppress(ValueError):
            parse()


@pytest.mark.parametrize("text", ["n[0-99999999999]", "n[0-9999][0-9999]", "9" * 5000])
def test_host_lists_that_are_too_long_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        expand_hostlist(text) and expand_tasks_per_node(text)
