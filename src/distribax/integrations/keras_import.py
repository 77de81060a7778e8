"""Makes Keras run on JAX, and connects it with strategies however late it is imported.

Keras chooses its backend when it is imported: TensorFlow by default. In a program that imports
distribax first, and does not choose, it is JAX.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from typing_extensions import override

from distribax import context
from distribax.errors import UnsupportedKerasError
from distribax.execution import adapters
from distribax.integrations.replacement import Function, replacement

_BACKEND = "KERAS_BACKEND"
_INTEGRATION = "distribax.integrations.keras"
_OLDEST = (3, 12)


def watch_import() -> None:
    """Notices when the program imports Keras, unless it has done so already."""
    if "keras" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds Keras as Python does, and lets `_Loader` load it."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads Keras with JAX as its backend, unless another one was chosen."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is as any other, with a loader that finds its files.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        is_chosen = _is_backend_chosen()
        if not is_chosen:
            os.environ[_BACKEND] = "jax"
        try:
            self._loader.exec_module(module)
        finally:
            if not is_chosen:
                # Other processes that the program starts decide for themselves.
                del os.environ[_BACKEND]
        # Models are about to be made in the scope that was entered before. If it is the integration
        # that imports Keras, it connects the two itself.
        if context.has_strategy() and _INTEGRATION not in sys.modules:
            adapters.load_adapters()


def _is_backend_chosen() -> bool:
    """Tells whether the environment or Keras's file of settings names a backend that is there.

    Keras writes the file itself, with TensorFlow in it, when it is imported for the first time.
    """
    if _BACKEND in os.environ:
        return True
    home = os.environ.get("KERAS_HOME")
    folder = Path(home) if home else Path.home() / ".keras"
    try:
        backend = json.loads((folder / "keras.json").read_text())["backend"]
    except (OSError, ValueError, KeyError):
        return False
    return backend != "tensorflow" or importlib.util.find_spec("tensorflow") is not None


def load_adapter() -> adapters.Adapter:
    """Connects strategies with Keras, or refuses to make its models in a scope."""
    keras: Any = sys.modules["keras"]
    problem = _find_problem(keras)
    if problem is None:
        try:
            adapter: adapters.Adapter = importlib.import_module(_INTEGRATION).adapter.adapt
            return adapter
        except UnsupportedKerasError as error:
            problem = str(error)
    # A program may have imported Keras for something else, which still works.
    owner = getattr(keras, "Variable", None) or keras.Model

    @replacement
    def refuse_in_scope(initialize: Function, /, *args: Any, **kwargs: Any) -> None:
        if context.has_strategy():
            raise UnsupportedKerasError(f"strategy.scope(): {problem}")
        initialize(*args, **kwargs)

    owner.__init__ = refuse_in_scope(owner.__init__)
    return lambda fn: fn


def _find_problem(keras: Any) -> str | None:
    version = tuple(int(part) for part in keras.__version__.split(".")[:2])
    if version < _OLDEST:
        return (
            f"Keras {keras.__version__} is too old for strategies. Install a version that "
            "distribax is tested with: pip install 'distribax[keras]'."
        )
    if keras.config.backend() != "jax":
        return (
            f"Keras runs on the backend {keras.config.backend()!r}, but strategies run on JAX. Set "
            "the environment variable KERAS_BACKEND=jax before the program starts, or import "
            "distribax before keras and leave it unset."
        )
    if keras.config.is_nnx_enabled():
        return (
            "Keras runs in NNX mode (KERAS_NNX_ENABLED), in which strategies cannot see its "
            "variables. Leave the environment variable unset."
        )
    return None
