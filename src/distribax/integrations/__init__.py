"""Other libraries' models inside replicas, as they are.

Nothing is to be called: the adapter of a library is loaded with the first step after the program
has imported the library.
"""

from __future__ import annotations

import importlib

from distribax.execution import foreign


def _adapter(module: str) -> foreign.Adapter:
    return importlib.import_module(f"distribax.integrations.{module}").adapt


foreign.register("flax.nnx", lambda: _adapter("nnx"))
