"""Command lines that differ in a few words: ``train.py {}``, and options such as ``--batch {1,2} {,--checkpoint}``.

Choices stand in braces, as in a shell: ``{1,2,4}``, or ``{,--checkpoint}`` for a word that is there or not. In the
command, ``{}`` says where the options go.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from refshard.errors import SpecError

PLACE = "{}"
_BRACES = re.compile(r"\{([^{}]*)\}")
_BEFORE = re.compile(r"(--?[A-Za-z][\w.-]*)[ =]$")


@dataclass(frozen=True, slots=True)
class Combination:
    """The ``words`` of one choice of each kind, and the choices by the name of their option."""

    words: tuple[str, ...]
    choices: Mapping[str, str]


def combinations(template: str, option: str) -> list[Combination]:
    """All combinations of the choices in ``template``, which the command line gave to ``option``; the last varies
    first.

    >>> [c.words for c in combinations("--batch {1,2} {,--checkpoint}", "--sweep")][:2]
    [('--batch', '1'), ('--batch', '1', '--checkpoint')]
    >>> combinations("--batch {1,2} {,--checkpoint}", "--sweep")[1].choices
    {'--batch': '1', '--checkpoint': 'yes'}

    Raises:
        SpecError: it has no choices, or quotes that do not close.
    """
    groups = [found.split(",") for found in _BRACES.findall(template)]
    if not groups or any(len(group) < 2 for group in groups):
        raise SpecError(f"{option} must have choices in braces, such as '--batch {{1,2,4}}', got '{template}'")
    names = _names(template, groups)
    return [
        Combination(
            _words(_filled(template, chosen), option),
            {name: _shown(choice, group) for name, choice, group in zip(names, chosen, groups)},
        )
        for chosen in product(*groups)
    ]


@dataclass(frozen=True, slots=True)
class Search:
    """A number that a ``template`` leaves open, the value of the option ``name``: a multiple of ``step``."""

    template: str
    name: str
    step: int

    def words(self, number: int) -> tuple[str, ...]:
        """The words with this number."""
        return _words(_filled(self.template, [str(number)]), "--largest")


def read_search(template: str) -> Search:
    """The number that ``template`` leaves open: with ``{}`` any, with ``{1024}`` a multiple of 1,024.

    >>> read_search("--seq-len {1024}").words(2048)
    ('--seq-len', '2048')

    Raises:
        SpecError: it leaves none or several open, or its step is no positive number.
    """
    found = _BRACES.findall(template)
    if len(found) != 1 or not (found[0] == "" or (found[0].isdigit() and int(found[0]))):
        raise SpecError(
            "--largest must leave one number open, as in '--batch {}', or multiples of one, as in '--seq-len {1024}', "
            f"got '{template}'"
        )
    return Search(template, _names(template, [["number"]])[0], int(found[0] or 1))


def inserted(command: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """The command with ``words`` where it says ``{}``.

    Raises:
        SpecError: it does not say where, or more than once.
    """
    if list(command).count(PLACE) != 1:
        raise SpecError(
            f"dryrun: the command must say once, with {{}}, where the options go that vary, got "
            f"'{shlex.join(command)}'; write `-- train.py {{}}`"
        )
    place = list(command).index(PLACE)
    return (*command[:place], *words, *command[place + 1 :])


@dataclass(frozen=True, slots=True)
class Number:
    """The number ``value`` of the option ``name`` of a command, in the word at ``place`` behind ``before``."""

    command: tuple[str, ...]
    name: str
    value: int
    place: int
    before: str = ""

    def words(self, number: int) -> tuple[str, ...]:
        """The command with another one."""
        return (*self.command[: self.place], f"{self.before}{number}", *self.command[self.place + 1 :])


def find_batch(command: Sequence[str]) -> Number | None:
    """The number of the only option with ``batch`` in its name; None if there is none, or several.

    >>> find_batch(["train.py", "--lr", "1", "--batch_size=24"]).words(8)
    ('train.py', '--lr', '1', '--batch_size=8')
    """
    command, found = tuple(command), list[Number]()
    for place, (word, following) in enumerate(zip(command, (*command[1:], ""))):
        option, equals, value = word.partition("=")
        if not re.fullmatch(r"[\w.-]*batch[\w.-]*", option, re.IGNORECASE):
            continue
        if equals and value.isdigit():
            found.append(Number(command, option, int(value), place, f"{option}="))
        elif not equals and option.startswith("-") and following.isdigit():
            found.append(Number(command, option, int(following), place + 1))
    return found[0] if len(found) == 1 else None


def _words(text: str, option: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise SpecError(f"{option}: '{text}' cannot be split into words ({error})") from None


def _filled(template: str, chosen: Sequence[str]) -> str:
    left = iter(chosen)
    return _BRACES.sub(lambda _: next(left), template)


def _names(template: str, groups: Sequence[Sequence[str]]) -> list[str]:
    """The option before the braces, or the word that is there or not; else all choices."""
    names: list[str] = []
    for found, group in zip(_BRACES.finditer(template), groups):
        before = _BEFORE.search(template[: found.start()])
        present = [choice for choice in group if choice]
        name = before[1] if before else present[0] if len(present) == 1 else " or ".join(present)
        names.append(name if name not in names else f"{name} ({len(names) + 1})")
    return names


def _shown(choice: str, group: Sequence[str]) -> str:
    if "" in group and len(group) == 2:
        return "yes" if choice else "no"
    return choice or "-"
