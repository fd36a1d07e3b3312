"""Tests of the model and its data; here, the small model that several of them share."""

from typing import Any

import msgspec

from refshard.specs.model import ModelSpec, parameter_count


def small_spec(**changes: Any) -> ModelSpec:
    """A model small enough to run in milliseconds, with as many key-value heads as query heads."""
    fields: dict[str, Any] = {
        "dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 4,
        "ffn_dim": 96,
        "vocab": 256,
        "norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tied": False,
        "params": 1,
        "source": "tests",
    }
    spec = ModelSpec(**{**fields, **changes})
    return msgspec.structs.replace(spec, params=parameter_count(spec))
