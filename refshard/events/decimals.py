"""Microseconds as decimal text become int64 nanoseconds, exactly."""

from collections.abc import Sequence
from decimal import Decimal

import msgspec
import numpy as np
import numpy.typing as npt

_LONGEST = 20  # characters; numpy saturates what an int64 cannot hold, which lies beyond the latest
_EARLIEST, _LATEST = -(2**61), 2**62  # nanoseconds: the difference of any two still fits an int64
_PLAIN = np.zeros(256, np.bool_)
_PLAIN[list(b"0123456789.,-")] = True
_COMMA, _DOT = b",."


def nanoseconds(microseconds: Sequence[msgspec.Raw | bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Nanoseconds of JSON numbers of microseconds, and which of them are numbers between -2**61 and 2**62 ns.

    Digits past the third decimal are rounded half away from zero. What is no number is 0 and marked unknown.

    >>> nanoseconds([b"1790857026000000.125", b"7", b"null"])
    (array([1790857026000000125,                7000,                   0]), array([ True,  True, False]))
    """
    if not len(microseconds):
        return np.empty(0, np.int64), np.empty(0, np.bool_)
    text = b",".join(microseconds) + b","
    characters = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(characters == _COMMA)
    lengths = np.diff(ends, prepend=-1) - 1
    if len(ends) != len(microseconds) or not _PLAIN[characters].all() or lengths.min() < 1 or lengths.max() > _LONGEST:
        return _one_by_one(microseconds)
    dots = np.flatnonzero(characters == _DOT)
    decimals = np.zeros(len(ends), np.int64)
    owners = np.searchsorted(ends, dots)
    decimals[owners] = ends[owners] - dots - 1
    if decimals.max() > 3:
        return _one_by_one(microseconds)
    digits = np.fromstring(text[:-1].replace(b".", b""), dtype=np.int64, sep=",")
    scale = 10 ** (3 - decimals)
    if (digits >= _LATEST // scale).any() or (digits <= _EARLIEST // scale).any():
        return _one_by_one(microseconds)
    return digits * scale, np.ones(len(ends), np.bool_)


def _one_by_one(microseconds: Sequence[msgspec.Raw | bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Everything that is not plain: exponents, strings, null, more decimals, numbers beyond any clock."""
    found, known = np.zeros(len(microseconds), np.int64), np.zeros(len(microseconds), np.bool_)
    for place, text in enumerate(microseconds):
        try:
            value = Decimal(bytes(text).decode().strip('"')) * 1000
            if not (value.is_finite() and _EARLIEST < value < _LATEST):
                continue
            found[place] = int(value.to_integral_value(rounding="ROUND_HALF_UP"))
            known[place] = True
        except (ArithmeticError, UnicodeDecodeError):
            continue
    return found, known
