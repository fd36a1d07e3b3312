"""Sharded checkpoints: save under one mode and world size, load under any other, bit for bit.

A checkpoint is a folder in the format of ``torch.distributed.checkpoint`` (DCP). It stands for the nested dictionary
``{"model": ..., "optimizer": {"state": ..., "param_groups": ...}, "extra": ..., "refshard": ...}`` of whole tensors
under the bare model's names, as torch's ``get_state_dict`` makes it, so torch's own tools read it. Like every DCP
checkpoint it holds pickled metadata: load only what you trust.

A save that is killed leaves the last good checkpoint in place (:mod:`refshard.folders`).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from refshard import folders
from refshard.engine.api import full_parameters
from refshard.engine.dcp import Place, check_loadable, key_of, read, write
from refshard.engine.local_part import local_of
from refshard.engine.optimizer_state import Restore, group_keys, kinds_of, plan_restore, state_of
from refshard.engine.parts import bare_name, kept_beside, named_parts, names_of, prefixes
from refshard.engine.saved import Saved
from refshard.errors import CheckpointError, nearest

T = TypeVar("T")

CONTENTS = (".metadata", "*.distcp")
"""What a checkpoint's folder holds; a folder that holds anything else is never replaced."""
MODEL, EXTRA, HEADER = "model", "extra", "refshard"
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""One optimizer, or several that share the model's parameters between them (Muon and AdamW), or none."""
Tie = dict[str, torch.Tensor]
"""Two keys of one tied parameter, and where to read what is under each."""
FORMAT = 1
"""Raised when a change makes older versions misread what is written."""


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of a sharded model, and replace the one in ``folder`` once the new one is complete.

    Collective over all ranks, between steps. ``optimizer`` may be several that share the model's parameters between
    them, such as Muon and AdamW. ``folder`` must be on a file system that all ranks share. Buffers and
    ``extra`` (any other JSON values that the run needs to resume) come from rank 0.

    Raises:
        CheckpointError: a rank could not write, or something cannot be saved; all ranks raise, and the old checkpoint
            in ``folder`` stays.
        EngineError: the model is not sharded.
    """
    entries = _together(lambda: _collect(model, optimizer, extra))
    aliases: dict[Place, list[Place]] = {
        (MODEL, part.name): [(MODEL, name) for name in part.names[1:]] for part in named_parts(model)
    }
    staging = folders.partial(folder)
    _together(lambda: _on_rank_0(lambda: folders.begin(folder, CONTENTS)))
    try:
        write(staging, entries, aliases)
        _together(lambda: _on_rank_0(lambda: Saved.open(staging)))
    except CheckpointError:
        # All ranks are here, so none still writes. After any other error one may, and the next save tidies up.
        _on_rank_0(lambda: folders.abandon(folder))
        raise
    _together(lambda: _on_rank_0(lambda: folders.commit(folder)))


def load(folder: str | Path, model: nn.Module, optimizer: Optimizers = None) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizer or optimizers, and return its ``extra``.

    Collective over all ranks, between steps. Any mode and world size can load a checkpoint of any other. Names, shapes
    and files are checked before anything is changed. Values are converted to the model's dtypes. An optimizer, which
    may be new, gets the saved state and the hyper-parameters that its parameters were saved with, in any group; it
    keeps its own ``foreach``, ``fused`` and ``capturable``. With ``optimizer=None`` the saved optimizer is ignored.

    A checkpoint that torch wrote with ``save({"model": ..., "optimizer": ...})`` can be loaded too; it has no extra.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is of another model or optimizer; all ranks raise.
        EngineError: the model is not sharded.
    """
    where = folders.current(folder)
    saved = _together(lambda: Saved.open(where))
    _check_same_on_all_ranks(saved)
    groups = [] if optimizer is None else group_keys(saved.metadata)
    small = read(where, {}, [key for key in (HEADER, EXTRA, *groups) if key in saved])
    tensors, ties, restore = _together(lambda: _plan(saved, small, groups, model, optimizer))
    _check_ties(where, ties)
    if restore is None:
        read(where, tensors)
    else:
        restore.finish(read(where, tensors | restore.tensors, restore.values))
    return dict(small.get(EXTRA, {}))


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The ``state_dict()`` of the unsharded model, on rank 0's CPU; an empty dictionary on other ranks.

    Collective over all ranks, between steps. It gathers one unit at a time, so other ranks need memory for one unit
    only. All names of a tied weight refer to one tensor, as in the unsharded model.

    Raises:
        EngineError: the model is not sharded.
    """
    found, names = dict[str, torch.Tensor](), names_of(model)
    for name, value in full_parameters(model):
        if _rank() == 0:
            found.update(dict.fromkeys(names[name], value.cpu()))
    if _rank() != 0:
        return {}
    state = ((bare_name(key), value) for key, value in model.state_dict().items())
    # What is no parameter is a buffer, or what modules add: scales of quantised parameters, say.
    return {k: found[k] if k in found else v.detach().cpu().clone() for k, v in state if isinstance(v, torch.Tensor)}


def _collect(model: nn.Module, optimizer: Optimizers, extra: Mapping[str, Any] | None) -> dict[Place, Any]:
    """This rank's share of the checkpoint. What all ranks hold alike is rank 0's to write."""
    parts = named_parts(model)
    optimizers = _listed(optimizer)
    state = state_of(optimizers, parts)
    entries: dict[Place, Any] = {(MODEL, part.name): part.parameter.detach() for part in parts}
    entries.update(state.tensors)
    if _rank() != 0:
        return entries
    header = {
        "format": FORMAT,
        "optimizer": kinds_of(optimizers),
        "scalars": sorted({str(place[-1]) for place in state.scalars}),
    }
    values = {(HEADER,): header, (EXTRA,): _plain(extra or {}), **state.values}
    for place, value in values.items():
        check_loadable(value, f"'{key_of(place)}'")
    buffers = {(MODEL, name): buffer.detach() for name, buffer in _buffers(model)}
    return entries | state.scalars | buffers | values


def _plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    """``extra``, once it is sure to come back as it went."""
    try:
        same = msgspec.json.decode(msgspec.json.encode(extra)) == extra
    except (TypeError, ValueError, msgspec.MsgspecError):
        same = False
    if not same:
        raise CheckpointError(
            f"extra must be made of dictionaries with string keys, lists, strings, finite numbers, booleans and None, "
            f"got {extra!r}; convert it"
        )
    return dict(extra)


def _plan(
    saved: Saved,
    small: Mapping[str, Any],
    groups: Sequence[str],
    model: nn.Module,
    optimizer: Optimizers,
) -> tuple[dict[str, torch.Tensor], list[Tie], Restore | None]:
    """All that is to be read, once it is sure that it fits; changes nothing."""
    header = small.get(HEADER, {})
    _check_header(saved.folder, header)
    tensors, ties = _wanted(saved, model)
    if optimizer is None:
        return tensors, ties, None
    settings = {key: small[key] for key in groups}
    scalars = header.get("scalars", ["step"])
    kinds = header.get("optimizer", ())
    restore = plan_restore(_listed(optimizer), named_parts(model), saved.metadata, settings, kinds, scalars)
    return tensors, ties, restore


def _wanted(saved: Saved, model: nn.Module) -> tuple[dict[str, torch.Tensor], list[Tie]]:
    """What to read into the model, in place, by key; and, for each further name of a tied weight under which the
    checkpoint holds other bytes, scratch for both, since they must be equal.
    """
    parts, buffers = named_parts(model), _buffers(model)
    known = [*(name for part in parts for name in part.names), *(name for name, _ in buffers)]
    for key in saved.keys_below(MODEL):
        name = key.removeprefix(f"{MODEL}.")
        if name not in known:
            raise CheckpointError(
                f"checkpoint {saved.folder} holds '{name}', which the model lacks ({nearest(name, known)}); "
                "build the model that was saved"
            )
    tensors, ties = {}, []
    for part in parts:
        keys = {key_of((MODEL, name)): name for name in part.names}
        present = [key for key in keys if key in saved]
        for key in present or list(keys)[:1]:
            saved.check_shape(key, tuple(part.shape), f"parameter '{keys[key]}'")
        value = part.parameter.detach()
        tensors[present[0]] = value
        for key in present[1:]:
            if saved.location(key) != saved.location(present[0]):
                ties.append({present[0]: torch.empty_like(value), key: torch.empty_like(value)})
    for name, buffer in buffers:
        key = key_of((MODEL, name))
        tensors[key] = buffer.detach()
        saved.check_shape(key, tuple(buffer.shape), f"buffer '{name}'")
    return tensors, ties


def _check_same_on_all_ranks(saved: Saved) -> None:
    if not dist.is_initialized():
        return
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, saved.save_id)
    for rank, save_id in enumerate(found):
        if save_id != found[0]:
            raise CheckpointError(
                f"rank {rank} finds another checkpoint than rank 0 in {saved.folder}; give a folder on a file system "
                "that all ranks share"
            )


def _check_header(where: Path, header: Mapping[str, Any]) -> None:
    if header.get("format", FORMAT) > FORMAT:
        raise CheckpointError(
            f"checkpoint {where} has format {header['format']}, this refshard reads up to {FORMAT}; update refshard"
        )


def _listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def _check_ties(where: Path, ties: Sequence[Tie]) -> None:
    for tie in ties:
        read(where, tie)

    def check() -> None:
        for tie in ties:
            one, other = map(local_of, tie.values())
            if not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
                names = [f"'{key.removeprefix(f'{MODEL}.')}'" for key in tie]
                raise CheckpointError(
                    f"checkpoint {where} holds different values of {' and '.join(names)}, which are one tied parameter "
                    "in the model; build the model without the tie"
                )

    if ties:
        _together(check)


def _buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that belong to the model's state, under every name, and what packed parameters keep beside them."""
    buffers = [
        (prefix + name, buffer)
        for prefix, module in prefixes(model)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    return buffers + kept_beside(model)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _on_rank_0(action: Callable[[], object]) -> None:
    if _rank() == 0:
        action()


def _together(action: Callable[[], T]) -> T:
    """Do something on every rank, and raise on every rank if it failed on one.

    Raises:
        CheckpointError: it failed, here or elsewhere; other errors of refshard and defects stay what they are.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    failures = [failure and f"{type(failure).__name__}: {failure}"]
    if dist.is_initialized():
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure and f"{type(failure).__name__}: {failure}")
    if isinstance(failure, OSError):
        raise CheckpointError(f"{failure}; make room, or choose a folder that can be written") from failure
    if failure is not None:
        raise failure
    for rank, message in enumerate(failures):
        if message is not None:
            raise CheckpointError(f"rank {rank} failed with {message}")
    return result
