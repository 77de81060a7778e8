"""Creating, pulling and pushing values, over each transport."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from distribax.parameter_server import (
    Assign,
    AssignAdd,
    ParameterServerError,
    ParametersLostError,
    ParameterSpec,
    Scatter,
)
from distribax.types import WriteKind
from tests.unit.parameter_server.conftest import Cluster

MATRIX = ParameterSpec("m", "matrix", (300, 100), "float32", 0)
COUNT = ParameterSpec("c", "count", (), "int32", 0)
VALUE = np.arange(30_000, dtype=np.float32).reshape(300, 100)


def test_a_client_reads_what_another_has_created(any_cluster: Cluster) -> None:
    any_cluster.client().create(MATRIX, VALUE)
    other = any_cluster.client()
    other.create(COUNT, np.int32(7))
    matrix, count = other.pull([MATRIX, COUNT])
    np.testing.assert_array_equal(matrix, VALUE)
    assert count == 7 and count.shape == ()


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "uint8", "int64", "float16", "complex64"])
def test_all_types_of_numbers_travel(any_cluster: Cluster, dtype: str) -> None:
    spec = ParameterSpec("x", "x", (3, 0, 2), dtype, 0)
    full = ParameterSpec("y", "y", (3, 2), dtype, 0)
    client = any_cluster.client()
    client.create(spec, np.ones(spec.shape, dtype))
    client.create(full, np.ones(full.shape, dtype))
    empty, ones = client.pull([spec, full])
    assert empty.shape == spec.shape
    assert ones.dtype == np.dtype(dtype) and np.all(ones == np.ones((), dtype))


def test_the_first_creation_wins(any_cluster: Cluster) -> None:
    client = any_cluster.client()
    assert client.create(MATRIX, VALUE)
    assert not client.create(MATRIX, VALUE + 1)
    np.testing.assert_array_equal(client.pull([MATRIX])[0], VALUE)


def test_a_second_creation_of_another_form_is_refused(cluster: Cluster) -> None:
    client = cluster.client()
    client.create(MATRIX, VALUE)
    other = dataclasses.replace(MATRIX, shape=(3, 4))
    with pytest.raises(ParameterServerError, match=r"exists with shape \(300, 100\)") as raised:
        client.create(other, np.zeros((3, 4), np.float32))
    assert raised.value.server == 0 and raised.value.kind == "ValueError"


def test_pulled_arrays_are_aligned_and_never_change(any_cluster: Cluster) -> None:
    client = any_cluster.client()
    client.create(MATRIX, VALUE)
    (before,) = client.pull([MATRIX])
    assert before.ctypes.data % 64 == 0
    with pytest.raises(ValueError, match="read-only"):
        before[0] = 1
    client.push({0: [AssignAdd("m", np.ones_like(VALUE))]})
    (after,) = client.pull([MATRIX])
    np.testing.assert_array_equal(before, VALUE)
    np.testing.assert_array_equal(after, VALUE + 1)


def test_what_has_not_changed_is_not_sent_again(any_cluster: Cluster) -> None:
    client = any_cluster.client()
    client.create(MATRIX, VALUE)
    client.create(COUNT, np.int32(0))
    (old_matrix, matrix), (old_count, _) = client.pull_versions([MATRIX, COUNT])
    client.push({0: [AssignAdd("c", np.int32(1))]})
    (new_matrix, same), (new_count, count) = client.pull_versions([MATRIX, COUNT])
    assert same is matrix and new_matrix == old_matrix
    assert new_count != old_count and count == 1


def test_operations_of_a_push_are_applied_in_order(any_cluster: Cluster) -> None:
    client = any_cluster.client()
    client.create(MATRIX, VALUE)
    row = np.full((1, 100), 5, np.float32)
    client.push(
        {
            0: [
                Assign("m", np.zeros_like(VALUE)),
                AssignAdd("m", np.ones_like(VALUE)),
                Scatter("m", WriteKind.ASSIGN_ADD, np.array([7, 7]), np.concatenate([row, row])),
                Scatter("m", WriteKind.ASSIGN, np.array([8, 8]), np.concatenate([row, 2 * row])),
            ]
        }
    )
    expected = np.ones_like(VALUE)
    expected[7], expected[8] = 11, 10
    np.testing.assert_array_equal(client.pull([MATRIX])[0], expected)


def test_row_operations_alone_and_then_a_whole_one(any_cluster: Cluster) -> None:
    client = any_cluster.client()
    client.create(MATRIX, VALUE)
    rows = np.ones((2, 100), np.float32)
    client.push({0: [Scatter("m", WriteKind.ASSIGN_ADD, [3, 3], rows)]})
    np.testing.assert_array_equal(client.pull([MATRIX])[0][3], VALUE[3] + 2)
    client.push({0: [Scatter("m", WriteKind.ASSIGN, [4, 299], rows), AssignAdd("m", VALUE)]})
    np.testing.assert_array_equal(client.pull([MATRIX])[0][299], VALUE[299] + 1)


@pytest.mark.parametrize("distinct", [1, 10, 40, 300])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_rows_of_equal_indices_are_summed(cluster: Cluster, distinct: int, dtype: str) -> None:
    rng = np.random.default_rng(distinct)
    indices = rng.integers(0, distinct, 200)
    rows = rng.integers(-1, 2, (200, 3)).astype(dtype)
    expected = np.zeros((300, 3), np.int64)
    np.add.at(expected, indices, rows.astype(np.int64))
    spec = ParameterSpec("t", "table", (300, 3), dtype, 0)
    client = cluster.client()
    client.create(spec, np.zeros((300, 3), dtype))
    client.push({0: [Scatter("t", WriteKind.ASSIGN_ADD, indices, rows)]})
    np.testing.assert_array_equal(client.pull([spec])[0].astype(np.int64), expected)


def test_numbers_are_cast_to_the_parameters_type(cluster: Cluster) -> None:
    client = cluster.client()
    client.create(MATRIX, VALUE.astype(np.float64))
    client.push({0: [AssignAdd("m", np.ones(MATRIX.shape, np.float64))]})
    assert client.pull([MATRIX])[0].dtype == np.float32


def test_arrays_need_not_be_contiguous(any_cluster: Cluster) -> None:
    client = any_cluster.client()
    client.create(MATRIX, np.broadcast_to(np.float32(2), MATRIX.shape))
    client.push({0: [AssignAdd("m", np.broadcast_to(np.float32(3), MATRIX.shape))]})
    client.push({0: [AssignAdd("m", np.asfortranarray(VALUE))]})
    np.testing.assert_array_equal(client.pull([MATRIX])[0], VALUE + 5)


def test_only_the_rows_asked_for_are_read(any_cluster: Cluster) -> None:
    client = any_cluster.client()
    client.create(MATRIX, VALUE)
    indices = np.array([[299, 0], [5, 5]])
    np.testing.assert_array_equal(client.pull_rows([(MATRIX, indices)])[0], VALUE[indices])
    client.push({0: [Scatter("m", WriteKind.ASSIGN_ADD, [5], np.ones((1, 100), np.float32))]})
    np.testing.assert_array_equal(client.pull_rows([(MATRIX, [5])])[0], VALUE[[5]] + 1)
    assert client.pull_rows([(MATRIX, np.zeros(0, np.int64))])[0].shape == (0, 100)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (Assign("m", np.zeros((2, 2), np.float32)), r"has shape \(2, 2\)"),
        (Assign("c", np.float32(1.5)), "dtype float32, expected"),
        (
            Scatter("m", WriteKind.ASSIGN_ADD, [300], np.zeros((1, 100), np.float32)),
            "expected 0 to 299",
        ),
        (Scatter("m", WriteKind.ASSIGN_ADD, [-1], np.zeros((1, 100), np.float32)), "reach from -1"),
        (
            Scatter("m", WriteKind.ASSIGN_ADD, [1.5], np.zeros((1, 100), np.float32)),
            "integers, not float64",
        ),
        (
            Scatter("m", WriteKind.ASSIGN, [1], np.zeros((2, 100), np.float32)),
            r"expected \(1, 100\)",
        ),
        (
            Scatter("m", WriteKind.ASSIGN, [[[1]]], np.zeros((1, 100), np.float32)),
            "of one dimension",
        ),
        (Scatter("c", WriteKind.ASSIGN, [0], np.zeros((1,), np.int32)), "is a scalar"),
    ],
)
def test_an_operation_that_does_not_fit_leaves_all_as_it_was(
    any_cluster: Cluster, operation: object, message: str
) -> None:
    client = any_cluster.client()
    client.create(MATRIX, VALUE)
    client.create(COUNT, np.int32(0))
    client.push({0: [AssignAdd("c", np.int32(1)), operation]})  # type: ignore[list-item]
    with pytest.raises(ParameterServerError, match=message):
        client.flush()
    matrix, count = client.pull([MATRIX, COUNT])
    np.testing.assert_array_equal(matrix, VALUE)
    assert count == 0


def test_an_error_of_a_push_is_raised_once_by_the_next_call(cluster: Cluster) -> None:
    client = cluster.client()
    client.create(COUNT, np.int32(0))
    client.push({0: [Assign("c", np.zeros(3, np.int32))]})
    with pytest.raises(ParameterServerError, match="count"):
        client.pull([COUNT])
    assert client.pull([COUNT]) == [0]


@pytest.mark.parametrize("indices", [[300], [1.0]])
def test_rows_that_do_not_exist_are_refused(any_cluster: Cluster, indices: list[float]) -> None:
    client = any_cluster.client()
    client.create(MATRIX, VALUE)
    with pytest.raises(ParameterServerError, match="Indices of rows of parameter 'matrix'"):
        client.pull_rows([(MATRIX, indices)])


def test_rows_of_a_scalar_are_refused(cluster: Cluster) -> None:
    client = cluster.client()
    client.create(COUNT, np.int32(0))
    with pytest.raises(ParameterServerError, match="scalar"):
        client.pull_rows([(COUNT, [0])])


def test_unknown_parameters_are_named(any_cluster: Cluster) -> None:
    client = any_cluster.client()
    client.create(COUNT, np.int32(0))
    with pytest.raises(ParametersLostError, match="there is no parameter 'm'"):
        client.pull([MATRIX])
    with pytest.raises(ParametersLostError, match="there is no parameter 'm'"):
        client.pull_rows([(MATRIX, [0])])
    client.push({0: [Assign("m", VALUE)]})
    with pytest.raises(ParametersLostError, match="there is no parameter 'm'"):
        client.flush()


def test_something_else_than_an_operation_is_refused(cluster: Cluster) -> None:
    client = cluster.client()
    with pytest.raises(TypeError, match="A push cannot carry 'nonsense'"):
        client.push({0: ["nonsense"]})  # type: ignore[list-item]


def test_a_parameter_that_is_not_there_is_named(any_cluster: Cluster) -> None:
    client = any_cluster.client()
    client.create(COUNT, np.int32(0))
    with pytest.raises(ParametersLostError, match="'m'"):
        client.pull([COUNT, MATRIX])
    with pytest.raises(ParametersLostError, match="'m'"):
        client.pull_rows([(MATRIX, [0])])
    assert client.pull([COUNT]) == [0]


def test_large_parameters_have_memory_of_their_own(cluster: Cluster) -> None:
    large = ParameterSpec("l", "large", (5 << 20,), "float32", 0)
    client = cluster.client()
    client.create(large, np.ones(large.shape, np.float32))
    assert client.pull([large])[0].sum() == 5 << 20
    assert cluster.servers[0].status()["bytes"] == large.nbytes


def test_the_first_note_wins(any_cluster: Cluster) -> None:
    client, other = any_cluster.client(), any_cluster.client()
    assert client.get_note("key") is None
    assert client.set_note("key", b"mine") == b"mine"
    assert other.set_note("key", b"yours") == b"mine"
    assert other.get_note("key") == b"mine"
    assert client.set_note("empty", b"") == b"" and other.get_note("empty") == b""


def test_several_servers_are_used_at_once(any_cluster: Cluster) -> None:
    for _ in range(3):
        any_cluster.start()
    client = any_cluster.client()
    specs = [ParameterSpec(f"p{i}", f"p{i}", (64, 64), "float32", i % 3) for i in range(7)]
    for i, spec in enumerate(specs):
        client.create(spec, np.full(spec.shape, i, np.float32))
    one = np.ones((64, 64), np.float32)
    client.push({i: [AssignAdd(s.uid, one) for s in specs if s.server == i] for i in range(3)})
    assert [value[0, 0] for value in client.pull(specs)] == [1, 2, 3, 4, 5, 6, 7]
    assert [client.status(i)["parameters"] for i in range(3)] == [3, 2, 2]


def test_an_error_of_one_server_leaves_the_others_usable(any_cluster: Cluster) -> None:
    any_cluster.start()
    any_cluster.start()
    client = any_cluster.client()
    here = ParameterSpec("a", "a", (), "float32", 0)
    missing = ParameterSpec("b", "b", (), "float32", 0)
    there = ParameterSpec("c", "c", (), "float32", 1)
    client.create(here, np.float32(1))
    client.create(there, np.float32(2))
    with pytest.raises(ParametersLostError, match="server 0"):
        client.pull([missing, there])
    assert client.pull([here, there]) == [1, 2]


def test_after_an_error_nothing_is_sent_to_any_server(cluster: Cluster) -> None:
    cluster.start()
    cluster.start()
    client = cluster.client()
    specs = [ParameterSpec(f"p{i}", f"p{i}", (), "int32", i) for i in range(2)]
    for spec in specs:
        client.create(spec, np.int32(0))
    one = np.int32(1)
    client.push({1: [Assign("p1", np.zeros(3, np.int32))]})
    with pytest.raises(ParameterServerError, match="server 1"):
        client.push({0: [AssignAdd("p0", one)], 1: [AssignAdd("p1", one)]})
    assert client.pull(specs) == [0, 0]


def test_threads_may_share_a_client(any_cluster: Cluster) -> None:
    client = any_cluster.client()
    client.create(COUNT, np.int32(0))

    def add() -> None:
        for _ in range(50):
            client.push({0: [AssignAdd("c", np.int32(1))]})
            client.pull([COUNT])

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.pull([COUNT]) == [200]


def test_status_says_what_a_server_has(cluster: Cluster) -> None:
    cluster.start()
    client = cluster.client("trainer")
    client.create(MATRIX, VALUE)
    client.push({0: [Assign("m", VALUE)]})
    client.flush()
    status = client.status(0)
    assert (status["parameters"], status["bytes"], status["connections"]) == (1, VALUE.nbytes, 1)
    assert client.client_id.startswith("trainer/")
    assert status["restored"] is None and status["snapshot"] is None


def test_a_closed_client_says_so(cluster: Cluster) -> None:
    client = cluster.client()
    client.create(COUNT, np.int32(0))
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.pull([COUNT])
