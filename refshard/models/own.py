"""A module of the user's own, made by a factory that is named as ``package.module:function``.

The factory takes no arguments. Each rank calls it once, and it returns the module and a function that makes batches::

    def build():
        model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=4, use_cache=False))

        def batch(sequences, seq_len, generator):
            ids = torch.randint(model.config.vocab_size, (sequences, seq_len), generator=generator)
            return {"input_ids": ids, "labels": ids}

        return model, batch

- The *module* has fp32 parameters. Its forward takes a batch by keyword and returns the loss, a scalar tensor, or an
  object that has it as ``.loss``. The loss is a mean over sequences of one size: only then is the mean of the ranks'
  losses that of the whole batch.
- *batch* returns tensors by name, on the CPU, the first dimension of each being ``sequences``. It draws from
  ``generator`` alone, which refshard seeds for each step, so that all ranks make the same global batch; each trains on
  its own rows.
- A third element names the *blocks* that become units, as the argument ``blocks`` of :func:`refshard.shard` does; by
  default they are the members of the outermost ``nn.ModuleList``.

The factory runs under ``torch.manual_seed(case.seed)`` with the rank's device as torch's default device.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from refshard.errors import SpecError, first_line, nearest
from refshard.models.data import Batch

Blocks = Sequence[str | type[nn.Module]]
MakeBatch = Callable[[int, int, torch.Generator], Mapping[str, Tensor]]
_DOCS = "see docs/how-to/measure.md"


@final
@dataclass(frozen=True, slots=True)
class Arguments(Batch):
    """What an own module's forward is called with; ``factory`` names it in errors."""

    tensors: Mapping[str, Tensor]
    factory: str

    def loss(self, module: nn.Module) -> Tensor:
        """See :meth:`Batch.loss`.

        Raises:
            SpecError: the forward returns something else.
        """
        output = module(**self.tensors)
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
            raise SpecError(
                f"model: the forward of '{self.factory}' must return the loss, a scalar tensor, or an object that has "
                f"it as .loss, got {found}; {_DOCS}"
            )
        return loss.reshape(())

    def split(self, parts: int) -> Sequence[Self]:
        """See :meth:`Batch.split`."""
        chunks = {name: tensor.chunk(parts) for name, tensor in self.tensors.items()}
        return [
            type(self)({name: found[part] for name, found in chunks.items()}, self.factory) for part in range(parts)
        ]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """What a factory made; ``blocks`` is None if it named none."""

    factory: str
    module: nn.Module
    make_batch: MakeBatch
    blocks: Blocks | None

    def batch(self, seed: int, sequences: int, seq_len: int, rows: range, device: torch.device) -> Arguments:
        """The ``rows`` of a global batch of ``sequences``, which ``seed`` alone decides.

        Raises:
            SpecError: the factory's function returns something else than tensors of that many rows.
        """
        generator = torch.Generator().manual_seed(seed)
        made = self.make_batch(sequences, seq_len, generator)
        rule = f"model: the batch of '{self.factory}' must be a dict of tensors whose first dimension is {sequences}"
        if not isinstance(made, Mapping):
            raise SpecError(f"{rule}, got {type(made).__name__}; {_DOCS}")
        for name, tensor in made.items():
            if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) != sequences:
                found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise SpecError(f"{rule}, got {found} for '{name}'; {_DOCS}")
        own = {name: tensor[rows.start : rows.stop].clone().to(device) for name, tensor in made.items()}
        return Arguments(own, self.factory)


def find_factory(name: str) -> Callable[[], Any]:
    """Import the factory ``name``; modules in the current folder count, as with ``python -m``.

    Raises:
        SpecError: there is no such module or function, or the module cannot be imported.
    """
    path, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    try:
        found: Any = import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise SpecError(f"model: importing '{path}' fails: {line_of(error)}; install what it imports") from error
        raise SpecError(
            f"model: '{name}' needs the module '{error.name}', found neither in {here} nor among installed "
            "packages; run from the folder that holds it, or install it"
        ) from None
    except Exception as error:
        raise SpecError(f"model: importing '{path}' fails: {line_of(error)}; correct it") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [own for own in vars(found) if not own.startswith("_")]
            raise SpecError(f"model: '{path}' has no '{attribute}'; {nearest(part, known)}")
        found = getattr(found, part)
    if not callable(found):
        raise SpecError(f"model: '{name}' must be a function, got {type(found).__name__}; {_DOCS}")
    factory: Callable[[], Any] = found
    return factory


def factory_file(name: str) -> Path | None:
    """The source file of the module that holds the factory ``name``, if it has one.

    Raises:
        SpecError: see :func:`find_factory`.
    """
    find_factory(name)
    path = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    return None if path is None else Path(path)


def build_own(name: str, seed: int, device: torch.device) -> OwnModel:
    """Call the factory ``name``; its module must be on ``device``.

    Raises:
        SpecError: it cannot be found, or does not return what it should.
    """
    factory = find_factory(name)
    torch.manual_seed(seed)
    with torch.device(device):
        made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        found = f"({', '.join(type(one).__name__ for one in made)})" if isinstance(made, tuple) else type(made).__name__
        raise SpecError(f"model: '{name}' must return (module, batch) or (module, batch, blocks), got {found}; {_DOCS}")
    module, make_batch, *rest = made
    if not callable(make_batch):
        raise SpecError(f"model: the batch of '{name}' must be a function, got {type(make_batch).__name__}; {_DOCS}")
    other = next(((n, p.dtype) for n, p in module.named_parameters() if p.dtype != torch.float32), None)
    if other is not None:
        raise SpecError(
            f"model: the parameters of '{name}' must be torch.float32, got {other[1]} for '{other[0]}'; build it in "
            "fp32: the case's precision says in what it is computed"
        )
    return OwnModel(factory=name, module=module.to(device), make_batch=make_batch, blocks=rest[0] if rest else None)


def line_of(error: BaseException) -> str:
    """Its type and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"
