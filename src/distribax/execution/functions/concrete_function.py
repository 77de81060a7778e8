"""One compiled specialisation of a function, to look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from typing_extensions import override

from distribax.execution.programs.program import Program


class ConcreteFunction:
    """A `dx.function` for arguments of certain shapes: its program, as text and by its cost.

    `get_concrete_function` of a `dx.function` makes it.

    Args:
        function: The whole function.
        program: The program for the arguments.
        inputs: Examples of the program's inputs.
        name: The name of the function.
        signature: The arguments that it is for.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        program: Program,
        inputs: list[Any],
        name: str,
        signature: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        self._function = function
        self._program = program
        self._inputs = inputs
        self._name = name
        self._signature = signature

    @property
    def name(self) -> str:
        """The name of the function."""
        return self._name

    @property
    def structured_input_signature(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that it was made for."""
        return self._signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def lower(self) -> jax.stages.Lowered:
        """Returns the program as JAX has it before it is compiled.

        Returns:
            What `jax.jit(...).lower(...)` returns.

        Raises:
            ValueError: The function looks up rows on parameter servers, which is several programs.
        """
        return self._program.lower(self._inputs)

    def as_text(self) -> str:
        """Returns the program as text (StableHLO).

        Returns:
            The text.
        """
        return self.lower().as_text()

    def cost_analysis(self) -> Mapping[str, float]:
        """Returns an estimate of what one call costs: operations, bytes read and written.

        Returns:
            Numbers by name, such as "flops".
        """
        cost: Any = self.lower().cost_analysis()
        return dict(cost or {})

    @override
    def __repr__(self) -> str:
        return f"<dx.function {self._name} for {self._signature}>"
