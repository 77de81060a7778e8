"""What a generator yields, as the user declares it."""

from __future__ import annotations

from distribax.data import arguments as check
from distribax.data import elements
from distribax.data.element_spec import Spec, TensorSpec
from distribax.data.plan.padding import parse_padded_shapes


def parse_signature(
    signature: Spec | None, types: object, shapes: object
) -> tuple[Spec | None, object]:
    """Returns a nest of TensorSpecs if shapes are given, or else a nest of dtypes if they are."""
    if signature is not None:
        if types is not None or shapes is not None:
            raise ValueError(
                "output_signature and output_types or output_shapes were both given; they mean the "
                "same. Keep output_signature."
            )
        for leaf in elements.list_leaves(signature):
            if not isinstance(leaf, TensorSpec):
                raise TypeError(
                    f"output_signature={signature!r} has {leaf!r} in it. Expected a "
                    "dx.data.TensorSpec, or a tuple or dict of them."
                )
        return signature, None
    if types is None:
        if shapes is not None:
            raise ValueError(
                f"output_shapes={shapes!r} was given without output_types. Give both, or "
                "output_signature."
            )
        return None, None
    dtypes = elements.map_leaves(lambda leaf: check.dtype(leaf, "output_types"), _as_tuple(types))
    if shapes is None:
        # Types alone leave even the number of dimensions open.
        return None, dtypes
    dims = parse_padded_shapes(_as_tuple(shapes), "output_shapes")
    return elements.map_leaves(
        lambda dtype, shape: TensorSpec(shape.dims, dtype), dtypes, dims
    ), None


def _as_tuple(nest: object) -> object:
    # A list of sizes is one shape; a list of anything else stands for a tuple.
    if isinstance(nest, list) and any(isinstance(part, (list, tuple, dict, type)) for part in nest):
        return tuple(nest)
    return nest
