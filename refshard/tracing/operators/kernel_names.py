"""Names of kernels, shortened to what tells one from another: the function, its functor or tile, and its types."""

import re
from collections import Counter
from collections.abc import Sequence

LONGEST = 72
_TENSILE = re.compile(
    r"^(Cijk_[A-Za-z]+_[A-Za-z]+(?:_[A-Z]+)*?)_(?:Bias|HA|UserArgs|MT).*?(MT\d+x\d+x\d+)(?:_(MI\d+x\d+x\d+))?"
)
_TILE = re.compile(r"^.*?tilesize\d+x\d+x\d+")
_COPY = re.compile(r"^Mem(?:cpy|set)\b")
_CLONE = re.compile(r" ?\[clone[^\]]*\]$")
_TOKEN = re.compile(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*|\b\d+(?=u?l{0,2}\b)(?:u?l{0,2})")
_DTYPES = {
    "float": "fp32", "double": "fp64", "c10::BFloat16": "bf16", "c10::Half": "fp16", "__nv_bfloat16": "bf16",
    "__half": "fp16", "cutlass::bfloat16_t": "bf16", "cutlass::half_t": "fp16", "__hip_bfloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8", "cutlass::tfloat32_t": "tf32", "nv_bfloat16": "bf16",
    "cutlass::float_e4m3_t": "fp8", "cutlass::float_e5m2_t": "fp8",
}  # fmt: skip
_FLOATS = {"DF16b": "c10::BFloat16", "DF16_": "c10::Half"}
"""The ABI's names of types; their digits are no length of an identifier."""
_HOLDERS = frozenset(("Kernel", "Kernel2", "device_kernel", "kentry", "trampoline_kernel"))
"""Functions that only hold what runs: their argument is the name."""
_TELL_NOTHING = frozenset((
    "void", "int", "long", "short", "char", "bool", "unsigned", "signed", "const", "true", "false", "std", "array",
    "Array", "detail", "Params", "operator", "lambda", "TensorIterator", "TensorIteratorBase",
    "TrivialOffsetCalculator", "OffsetCalculator", "function_traits", "gpu_kernel_impl", "gpu_kernel_impl_nocast",
    "gpu_kernel_with_scalars", "LoadWithCast", "StoreWithCast", "LoadWithoutCast", "StoreWithoutCast",
    "BinaryFunctor", "BUnaryFunctor", "AUnaryFunctor", "IntegralConstant", "integral_constant", "tuple", "Tuple",
    "basic_string", "opmath_type", "uint32_t", "int32_t", "int64_t", "uint64_t", "size_t", "enable_sm80_or_later",
    "enable_sm90_or_later", "sequence", "enable_sm80_to_sm89", "ArrayRef", "OpaqueType", "GLOBAL__N_1", "PassThrough",
    "Scalar", "OpType", "InMemoryDataOperationEnum",
))  # fmt: skip
_FEW = (3, 2, 4)
"""So many names, types and numbers of a template's arguments are told."""


def short_kernel_names(names: Sequence[str]) -> tuple[str, ...]:
    """A short name for each kernel; those that would come out alike are numbered."""
    found = [short_kernel_name(name) for name in names]
    alike, seen = Counter(found), Counter[str]()
    for place, name in enumerate(found):
        if alike[name] > 1:
            seen[name] += 1
            found[place] = f"{name} #{seen[name]}"
    return tuple(found)


def short_kernel_name(name: str) -> str:
    """A kernel's name of at most :data:`LONGEST` characters.

    >>> short_kernel_name("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)")
    'vectorized_elementwise_kernel<CUDAFunctor_add, fp32, 4>'
    """
    if _COPY.match(name):  # what stands in parentheses tells pinned memory from pageable
        return _cut(name)
    if match := _TENSILE.match(name):
        return _cut(" ".join(part for part in match.groups() if part))
    if match := _TILE.match(name):
        return _cut(match[0])
    if name.startswith("_Z"):
        return _told(*_mangled(name))
    plain = _CLONE.sub("", name.removeprefix("void ").replace("(anonymous namespace)::", "")).strip()
    if plain.startswith("std::enable_if<"):  # the type of what it returns comes first
        plain = (
            plain[len("std::enable_if<") + len(_arguments(plain[len("std::enable_if") :])) :].partition(" ")[2] or plain
        )
    head = re.match(r"[^<(]*", plain)
    assert head is not None
    if head.end() == len(plain):
        return _cut(plain)
    inside = _arguments(plain[head.end() :]) if plain[head.end()] == "<" else ""
    return _told(head[0].rpartition("::")[2], [token[0] for token in _TOKEN.finditer(inside)])


def name_in_words(name: str) -> str:
    """A name for a sentence or a cell: a kernel's is shortened where it is long, all others are cut at most.

    >>> name_in_words("aten::copy_"), name_in_words("Memcpy HtoD (Pageable -> Device)")
    ('aten::copy_', 'Memcpy HtoD (Pageable -> Device)')
    """
    return name if len(name) <= LONGEST else short_kernel_name(name)


def _arguments(text: str) -> str:
    """What stands between the template's brackets that ``text`` begins with."""
    depth = 0
    for place, letter in enumerate(text):
        if letter == ">" and text[place - 1] == "-":
            continue
        depth += (letter == "<") - (letter == ">")
        if depth == 0:
            return text[1:place]
    return text[1:]


def _told(function: str, tokens: Sequence[str]) -> str:
    """A function with the telling ones of its template's arguments."""
    names, dtypes, numbers = list[str](), list[str](), list[str]()
    for token in tokens:
        last = token.rpartition("::")[2]
        if token in _DTYPES:
            dtypes.append(_DTYPES[token])
        elif token[0].isdigit():
            numbers.append(token.rstrip("ul"))
        elif len(last) > 1 and last not in _TELL_NOTHING:
            names.append(last)
    names, dtypes = list(dict.fromkeys(names)), list(dict.fromkeys(dtypes))
    if function in _HOLDERS and names:
        function, *names = names
    few = zip((names, dtypes, numbers), _FEW)
    chosen = [part for parts, most in few for part in parts[:most]]
    while chosen and len(f"{function}<{', '.join(chosen)}>") > LONGEST:
        chosen.pop(0 if len(chosen[0]) > LONGEST // 2 else -1)
    return _cut(f"{function}<{', '.join(chosen)}>" if chosen else function)


def _mangled(name: str) -> tuple[str, list[str]]:
    """The function of a mangled name (Itanium's ABI), and its template's names and numbers, in order."""
    function, tokens, of_function, place = "", list[str](), True, 2
    while place < len(name):
        if match := re.compile(r"L[a-z](\d+)E").match(name, place):
            tokens.append(match[1])
            place = match.end()
        elif match := re.compile(r"DF(\d+)([b_x])").match(name, place):
            tokens += [_FLOATS[match[0]]] if match[0] in _FLOATS else []
            place = match.end()
        elif match := re.compile(r"\d+").match(name, place):
            word = name[match.end() : match.end() + int(match[0])]
            place = match.end() + max(1, len(word))
            if of_function:
                function = word
            elif word and not (word.isalpha() and word.islower()):  # or it is a scope
                tokens.append(word)
        else:
            of_function = of_function and (not function or name[place] not in "IE")
            place += 1
    return function or name, tokens


def _cut(name: str) -> str:
    """A name cut in its middle where it is too long."""
    if len(name) <= LONGEST:
        return name
    head = 2 * LONGEST // 3
    return f"{name[:head]}…{name[-(LONGEST - head - 1) :]}"
