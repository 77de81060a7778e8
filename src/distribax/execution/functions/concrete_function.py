"""One compiled specialisation of a function, to look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from typing_extensions import override

from distribax.execution.programs.program import Program


@dataclass(frozen=True, eq=False, repr=False)
class ConcreteFunction:
    """A `dx.function` for arguments of certain shapes: its program, as text and by its cost.

    `get_concrete_function` of a `dx.function` makes it, from the whole function, the program for
    the arguments and examples of the program's inputs.

    Attributes:
        name: The name of the function.
        structured_input_signature: The arguments that it was made for.
    """

    _function: Callable[..., Any]
    _program: Program
    _inputs: list[Any]
    name: str
    structured_input_signature: tuple[tuple[Any, ...], dict[str, Any]]

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
        return f"<dx.function {self.name} for {self.structured_input_signature}>"
