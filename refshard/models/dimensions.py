"""The dimensions of a decoder that a factory makes, for closed forms.

The factory runs on the meta device, so that a model of any size takes seconds and no memory. Dimensions come from the
first of these that the module has:

1. ``spec``, a :class:`~refshard.specs.model.ModelSpec`, as this project's own Llama.
2. ``config``, of a family that a ``config.json`` may be of, as models of transformers.
3. Shapes of a decoder's parameters (``shapes.py``).

They are only trusted if their closed form has exactly as many parameters as the module.
"""

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import msgspec
import torch
from torch import nn

from refshard.errors import SpecError
from refshard.models.own import find_factory
from refshard.models.shapes import config_of, count, leads_to, spec_of_shapes
from refshard.specs.hf_config import FAMILIES, Source, config_fields
from refshard.specs.model import ModelSpec, parameter_count
from refshard.specs.reading import convert

REMEDY = "give the dimensions in a TOML file instead: --model mine.toml (docs/how-to/own-model.md)"


def read_dimensions(name: str) -> ModelSpec:
    """The dimensions of the module that the factory ``name`` returns, alone or before its batch.

    Raises:
        SpecError: there is no such factory, it fails on the meta device, or what it makes is no decoder that can be
            recognised.
    """
    module = _made(name)
    if frozen := sum(not parameter.requires_grad for parameter in module.parameters()):
        raise _refused(name, f"every parameter must be trained, got {frozen} that are frozen")
    spec, counted = _spec_of(module, name), count(module)
    if (expected := parameter_count(spec)) != counted:
        raise _refused(
            name, f"the dimensions read from the module ({_words(spec)}) must give its {counted:,} parameters, got "
            f"{expected:,}",
        )  # fmt: skip
    return msgspec.structs.replace(spec, params=counted)


def _made(name: str) -> nn.Module:
    """The module, on the meta device. What the factory prints goes to standard error."""
    factory = find_factory(name)
    try:
        with torch.device("meta"), redirect_stdout(sys.stderr):
            made = factory()
    except Exception as error:
        line = (str(error).strip() or "no message").splitlines()[0]
        raise _refused(name, f"the factory must run on the meta device, got {type(error).__name__}: {line}") from error
    module = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(module, nn.Module):
        raise _refused(name, f"the factory must return a module, or (module, batch), got {type(made).__name__}")
    return module


def _spec_of(module: nn.Module, name: str) -> ModelSpec:
    """Its dimensions, or those of the module inside that has all parameters, where it only adds a loss."""
    for inner in (one for one in module.modules() if count(one) == count(module)):
        spec: Any = getattr(inner, "spec", None)
        if isinstance(spec, ModelSpec):
            return spec
        config = config_of(inner)
        if config.get("model_type") in FAMILIES and leads_to(inner, config.get("vocab_size")):
            source = Source(name=f"model: the configuration of '{name}'", remedy=REMEDY)
            # In files a head_dim that is missing may be a default; what a module has, its parameters tell.
            return _converted(config_fields({"head_dim": None, **config}, source), name)
    try:
        fields = spec_of_shapes(module)
    except ValueError as error:
        raise _refused(name, str(error)) from None
    return _converted(fields, name)


def _converted(fields: Mapping[str, Any], name: str) -> ModelSpec:
    return convert({**fields, "source": f"the factory {name}", "params": 1}, ModelSpec, where=f"model '{name}'")


def _words(spec: ModelSpec) -> str:
    heads = f"{spec.n_heads} heads of {spec.head_dim}, {spec.n_kv_heads} of keys"
    return f"{spec.n_layers} layers of width {spec.dim}, {heads}, feed-forward {spec.ffn_dim}, vocabulary {spec.vocab}"


def _refused(name: str, problem: str) -> SpecError:
    return SpecError(f"model: to plan for the factory '{name}', {problem}; {REMEDY}")
