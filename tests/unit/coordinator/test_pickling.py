"""What goes to workers and how: functions, arguments, classes, references."""

from __future__ import annotations

import functools
import gc
import math
import pickle
import sys
import threading
import types
from typing import Any

import cloudpickle
import numpy as np
import pytest

from distribax.coordinator import PerWorkerValues
from distribax.coordinator.pickling import FunctionCatalogue, describe, dump_arguments
from distribax.coordinator.references import WorkerReference


class Model:
    """Something with a method, which holds something."""

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def step(self) -> Any:
        return self.held

    def other(self) -> Any:
        return None

    def __call__(self) -> Any:
        return self.held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self) -> Any:
        return self.held


def one() -> int:
    return 1


@pytest.fixture
def module(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    """A module of the program's own."""
    made = types.ModuleType(f"a_program_{request.node.name}")
    made.__file__ = str(tmp_path / "program.py")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]
    if made.__name__ in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.unregister_pickle_by_value(made)


def test_a_function_is_pickled_once() -> None:
    catalogue = FunctionCatalogue()
    first = catalogue.define(one)
    assert catalogue.define(one) is first
    assert pickle.loads(first.dump_for(0))() == 1
    assert first.name.endswith("test_pickling.one")


def test_the_same_code_is_sent_once() -> None:
    catalogue = FunctionCatalogue()
    made = [lambda: 1 for _ in range(3)]
    assert len({catalogue.define(fn).number for fn in made}) == 1
    with_values = [functools.partial(pow, number) for number in range(3)]
    assert len({catalogue.define(fn).number for fn in with_values}) == 3


def test_methods_belong_to_their_object() -> None:
    catalogue = FunctionCatalogue()
    model = Model(1)
    step = catalogue.define(model.step)
    assert catalogue.define(model.step) is step
    assert catalogue.define(model.other) is not step
    assert catalogue.define(Model(2).step) is not step
    model.held = 5
    assert catalogue.define(model.step) is step


def test_a_function_that_is_gone_is_forgotten() -> None:
    catalogue = FunctionCatalogue()
    for number in range(20):
        catalogue.define(Model(number).step)
        catalogue.define(functools.partial(pow, number))
    gc.collect()
    assert not catalogue._known and not catalogue._by_digest


def test_callables_that_cannot_be_referred_to_weakly_are_pickled_each_time() -> None:
    catalogue = FunctionCatalogue()
    slotted = Slotted(1)
    first = catalogue.define(slotted)
    slotted.held = 2
    second = catalogue.define(slotted)
    assert first is not second and pickle.loads(second.dump_for(0))() == 2


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (one, "test_pickling.one"),
        (functools.partial(functools.partial(one)), "test_pickling.one"),
        (Model(), "test_pickling.Model"),
        (Model().step, "Model.step"),
        (math.sqrt, "math.sqrt"),
    ],
)
def test_names(fn: Any, name: str) -> None:
    assert describe(fn).endswith(name)


def test_functions_of_the_programs_modules_are_pickled_by_value(module: Any) -> None:
    exec("OFFSET = 3\ndef add(x):\n    return x + OFFSET\n", module.__dict__)
    data = FunctionCatalogue().define(module.add).dump_for(0)
    del sys.modules[module.__name__]
    try:
        assert pickle.loads(data)(1) == 4
    finally:
        sys.modules[module.__name__] = module


def test_a_module_that_cannot_be_pickled_has_to_be_imported(module: Any) -> None:
    exec(
        "import threading\nLOCK = threading.Lock()\ndef use():\n    return LOCK\n", module.__dict__
    )
    data = FunctionCatalogue().define(module.use).dump_for(0)
    assert pickle.loads(data) is module.use
    # It stays so: what is in it has to be the same everywhere.
    assert FunctionCatalogue().define(module.use).dump_for(0) == data


def test_installed_functions_go_by_name() -> None:
    for fn in (math.sqrt, functools.reduce, np.mean, pytest.approx, describe):
        assert len(FunctionCatalogue().define(fn).dump_for(0)) < 100


def test_arguments() -> None:
    assert dump_arguments(one, (), {}) == (None, ())
    data, needs = dump_arguments(one, (1, np.arange(2)), {"a": "b"})
    assert data is not None and needs == ()
    args, kwargs = pickle.loads(data)
    assert args[0] == 1 and args[1].tolist() == [0, 1] and kwargs == {"a": "b"}


def test_references_are_found_wherever_they_are() -> None:
    values = PerWorkerValues([1, 2])
    _, needs = dump_arguments(one, ({"deep": [values]},), {"again": Model(values)})
    assert values in needs
    definition = FunctionCatalogue().define(lambda: values)
    assert definition.needs == (values,)
    assert [pickle.loads(values.definition.dump_for(index)) for index in (0, 1)] == [1, 2]


def test_a_class_of_the_program_goes_by_number(module: Any) -> None:
    exec("class Point:\n    pass\ndef use(point):\n    pass\n", module.__dict__)
    module.Point.__module__ = module.__name__
    FunctionCatalogue().define(module.use)
    sizes, numbers = set(), set()
    for _ in range(2):
        data, needs = dump_arguments(module.use, (module.Point(),), {})
        assert data is not None
        sizes.add(len(data))
        numbers |= {need.definition.number for need in needs}
    assert len(numbers) == 1 and max(sizes) < 150


def test_references_are_for_schedule_only() -> None:
    with pytest.raises(TypeError, match=r"PerWorkerValues cannot be pickled: .*schedule\(\)"):
        pickle.dumps(PerWorkerValues([1]))


@pytest.mark.parametrize("values", [[], 3, "ab", None])
def test_wrong_per_worker_values(values: Any) -> None:
    with pytest.raises(ValueError, match="is not a list with one value for each worker"):
        PerWorkerValues(values)


def test_the_base_of_references_has_no_definition() -> None:
    with pytest.raises(NotImplementedError, match="WorkerReference does not say what workers"):
        _ = WorkerReference().definition


def test_what_cannot_be_pickled() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"arguments of .*one cannot be sent to a worker: .*lock"):
        dump_arguments(one, (lock,), {})
    with pytest.raises(TypeError, match=r"schedule: fn=.* cannot be sent to a worker"):
        FunctionCatalogue().define(lambda: lock)
