"""The shared words: enums that are parsed, options that check themselves."""

from __future__ import annotations

import re
from typing import Any

import pytest

import distribax as dx
from distribax.types import is_python_number


@pytest.mark.parametrize(
    "value", ["sum", "SUM", "Sum", dx.ReduceOp.SUM, dx.VariableAggregation.SUM]
)
def test_members_are_given_by_name(value: Any) -> None:
    assert dx.ReduceOp.parse(value, "op") is dx.ReduceOp.SUM


@pytest.mark.parametrize("value", ["max", 3, None, dx.VariableAggregation.NONE])
def test_an_unknown_member_lists_the_known_ones(value: Any) -> None:
    expected = (
        rf"op={re.escape(repr(value))} is not a ReduceOp.*ReduceOp.SUM, ReduceOp.MEAN.*op='SUM'"
    )
    with pytest.raises(ValueError, match=expected):
        dx.ReduceOp.parse(value, "op")


def test_a_reduction_stands_for_an_aggregation() -> None:
    convert = dx.ReduceOp.from_variable_aggregation
    assert convert(dx.VariableAggregation.SUM) is dx.ReduceOp.SUM
    assert convert(dx.VariableAggregation.MEAN) is dx.ReduceOp.MEAN
    for aggregation in (dx.VariableAggregation.NONE, dx.VariableAggregation.ONLY_FIRST_REPLICA):
        with pytest.raises(ValueError, match=rf"{aggregation} has no reduction; only .*SUM"):
            convert(aggregation)


def test_the_older_name_of_the_first_replica() -> None:
    assert dx.VariableAggregation.ONLY_FIRST_TOWER is dx.VariableAggregation.ONLY_FIRST_REPLICA


@pytest.mark.parametrize(
    ("value", "expected"), [(1, True), (1.0, True), (True, True), ("1", False)]
)
def test_python_numbers(value: object, expected: bool) -> None:
    assert is_python_number(value) is expected


def test_options_check_themselves() -> None:
    options = dx.CommunicationOptions(implementation="nccl")
    assert options.implementation is dx.CommunicationImplementation.NCCL
    assert dx.CommunicationOptions() == dx.CommunicationOptions()
    with pytest.raises(ValueError, match=r"bytes_per_pack=-1 is negative.*0 for the default"):
        dx.CommunicationOptions(bytes_per_pack=-1)
    with pytest.raises(ValueError, match=r"timeout_seconds=0 is not positive.*None"):
        dx.CommunicationOptions(timeout_seconds=0)
    with pytest.raises(ValueError, match=r"implementation='mpi' is not a Communication"):
        dx.CommunicationOptions(implementation="mpi")


def test_value_and_run_options_have_defaults() -> None:
    assert dx.ValueContext() == dx.ValueContext(0, 1)
    assert dx.RunOptions() == dx.RunOptions()
