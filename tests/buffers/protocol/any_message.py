"""Hypothesis strategies for messages of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel, JsonValue

from async_rlhf.buffers.protocol import wire

MESSAGES = get_args(wire.Message)
TEXT = st.text(max_size=20)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
INTS = st.integers(-(1 << 63), (1 << 64) - 1)
JSON = st.recursive(
    st.none() | st.booleans() | INTS | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def like(model: type[BaseModel]) -> st.SearchStrategy[Any]:
    """Instances of a message, field by field, within what its fields allow."""
    fields = {name: _like_type(f.annotation, f.metadata) for name, f in model.model_fields.items() if name != "type"}
    return st.builds(model, **fields)


def _like_type(annotation: Any, limits: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    lows = [(getattr(limit, name), name) for limit in limits for name in ("ge", "gt") if hasattr(limit, name)]
    highs = [(getattr(limit, name), name) for limit in limits for name in ("le", "lt") if hasattr(limit, name)]
    (low, above), (high, below) = max(lows, default=(-(1 << 63), "ge")), min(highs, default=((1 << 64) - 1, "le"))
    most = next((limit.max_length for limit in limits if hasattr(limit, "max_length")), 20)
    least = next((limit.min_length for limit in limits if hasattr(limit, "min_length")), 0)
    simple = {
        int: st.integers(int(max(low, -1)), int(max(low, 4))) | st.integers(int(low), int(high)),
        str: st.sampled_from(("anna", "ben")) | st.text(min_size=least, max_size=min(20, most)),
        bool: st.booleans(),
        float: st.floats(low, high, exclude_min=above == "gt", exclude_max=below == "lt") if highs else FINITE,
        type(None): st.none(),
        JsonValue: JSON,
        Any: JSON,
    }
    if annotation in simple:
        return simple[annotation]
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _like_type(
            arguments[0], [*limits, *(limit for each in arguments[1:] for limit in getattr(each, "metadata", [each]))]
        )
    if kind is Literal:
        return st.sampled_from(arguments)
    if kind is list:
        return st.lists(_like_type(arguments[0]), min_size=least, max_size=least + 3)
    if kind is tuple:
        return st.tuples(*map(_like_type, arguments))
    if kind is dict:
        return st.dictionaries(_like_type(arguments[0]), _like_type(arguments[1]), max_size=3)
    if kind in (Union, UnionType):
        return st.one_of(*map(_like_type, arguments))
    return like(annotation)
