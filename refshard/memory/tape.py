"""What is allocated and let go while one part of a model computes: changes in order, without a tensor."""

from typing import Literal, NamedTuple

Category = Literal["parameters", "gradients", "optimizer", "unsharded", "activations", "workspace"]
CATEGORIES: tuple[Category, ...] = (
    "parameters", "gradients", "optimizer", "unsharded", "activations", "workspace"
)  # fmt: skip
"""*parameters* are what the optimizer updates (this rank's shards of fp32 masters, or all of them), *gradients* what it
reads, *optimizer* its state; *unsharded* the buffers that parameters are gathered into and gradients reduced from;
*activations* what forward makes in the units and keeps for backward; *workspace* the rest: what the loss takes, what
backward makes on its way (gradients of activations, and of weights until a reduction takes them), and what collectives
and kernels take for themselves.
"""


class Change(NamedTuple):
    """``nbytes`` more (or, negative, fewer) of ``category``; or, with ``arrived``, the moment in backward at which the
    gradient of that parameter, ``nbytes`` of workspace that were taken before, is handed over to whoever trains it.
    """

    category: Category
    nbytes: int
    arrived: str = ""


Changes = tuple[Change, ...]


class Tape:
    """Writes changes down while a model's ops are told in the order in which torch runs them.

    A tensor lives as long as something refers to it: a Python variable, from :meth:`make` to :meth:`drop`, and every
    op that saves it for its backward, from :meth:`save` to the :meth:`drop` of that op's backward. Where forward keeps
    nothing (its layer will be computed again), saving is without effect. ``retained`` tensors stay all the same when
    they are made, and ``present`` ones are there already. ``granule`` is what an allocator rounds to.
    """

    def __init__(
        self,
        *,
        keeps: bool = True,
        granule: int = 1,
        retained: frozenset[str] = frozenset(),
        present: frozenset[str] = frozenset(),
    ) -> None:
        self.category: Category = "activations"
        self._keeps, self._granule = keeps, granule
        self._retained, self._present = retained, present
        self._changes: list[Change] = []
        self._held: dict[str, tuple[Category, int, int]] = {}

    def make(self, name: str, nbytes: int) -> str:
        """A tensor of ``nbytes`` is allocated, and a variable refers to it."""
        self.adopt(name, nbytes)
        category, rounded, _ = self._held[name]
        if name in self._retained:
            self._held[name] = (category, rounded, 2)
        if name not in self._present:
            self._changes.append(Change(category, rounded))
        return name

    def adopt(self, name: str, nbytes: int) -> str:
        """A variable refers to a tensor of ``nbytes`` that is there already."""
        assert name not in self._held, f"{name} is held already"
        self._held[name] = (self.category, -(-nbytes // self._granule) * self._granule, 1)
        return name

    def save(self, *names: str) -> None:
        """An op saves tensors for its backward."""
        for name in names if self._keeps else ():
            category, nbytes, references = self._held[name]
            self._held[name] = (category, nbytes, references + 1)

    def drop(self, *names: str) -> None:
        """A reference to each tensor goes; with the last one, the tensor does."""
        for name in names:
            category, nbytes, references = self._held.pop(name)
            if references > 1:
                self._held[name] = (category, nbytes, references - 1)
            else:
                self._changes.append(Change(category, -nbytes))

    def arrive(self, name: str) -> None:
        """The gradient ``name`` of a parameter is handed over, and no longer this tape's to drop."""
        category, nbytes, references = self._held.pop(name)
        assert references == 1, f"{name} is referred to by others"
        self._changes.append(Change(category, nbytes, name))

    def cut(self) -> Changes:
        """The changes since the last cut."""
        changes, self._changes = tuple(self._changes), []
        return changes
