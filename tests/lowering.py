"""A quicker way from a function to a program, for processes that lower thousands of them."""

from __future__ import annotations

import os
import threading
from typing import Any

from jax._src.interpreters import mlir
from jaxlib.mlir import ir

COMPILES_AS_USERS = os.environ.get("DISTRIBAX_COMPILE") == "as-users"
"""Whether programs are made as users' programs are: the last part of `make contract`."""


def share_contexts() -> None:
    """Lets all programs that a thread lowers have one MLIR context.

    JAX makes one for each program and loads all dialects into it; for a small program that is half
    of the time of lowering. What a context holds are types and attributes, which modules may share.
    A program that is made while another one is lowered has a context of its own, as without this:
    in the same one, MLIR would insert what is copied into the other program.
    """
    if COMPILES_AS_USERS or not hasattr(mlir, "make_ir_context"):
        return
    make, kept = mlir.make_ir_context, threading.local()

    def get_context() -> Any:
        if ir.Context.current is not None:
            return make()
        if not hasattr(kept, "context"):
            kept.context = make()
        return kept.context

    mlir.make_ir_context = get_context
