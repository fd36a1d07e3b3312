"""Formats for people. Storage is always seconds, bytes, FLOP/s and int64 nanoseconds; only the edge formats.

GiB is 2**30 bytes and is written GiB. TFLOPS is 10**12 floating-point operations per second.
"""

import math
import re
from typing import Literal

KIB = 1024
MIB = 1024**2
GIB = 1024**3


_COUNT = r"([1-9]\d{0,11})([kKmM]?)"


def parse_count(text: str) -> int:
    """A number of tokens, sequences, ranks or anything else that is counted: k is 2^10, M is 2^20.

    >>> parse_count("8k"), parse_count("4M"), parse_count("1000")
    (8192, 4194304, 1000)

    Raises:
        ValueError: it is no such number.
    """
    found = re.fullmatch(_COUNT, text.strip())
    if not found:
        raise ValueError(f"must be a number >= 1, with k for 2^10 or M for 2^20, got {text!r}; write 4 or 8k")
    return int(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()]


def parse_counts(text: str) -> list[int]:
    """Several numbers, each once: separated by commas, or doubling between two.

    >>> parse_counts("1,2,4k"), parse_counts("64..512")
    ([1, 2, 4096], [64, 128, 256, 512])

    Raises:
        ValueError: it is neither.
    """
    if doubled := re.fullmatch(rf"({_COUNT})\.\.({_COUNT})", text.strip()):
        count, most, found = parse_count(doubled[1]), parse_count(doubled[4]), []
        if count > most:
            raise ValueError(f"must ascend, got {text!r}; write, for example, 64..2048")
        while count <= most:
            found.append(count)
            count *= 2
        return found
    try:
        found = [parse_count(number) for number in text.split(",") if number.strip()]
    except ValueError:
        found = []
    if not found:
        raise ValueError(f"must be numbers from 1, separated by commas, got {text!r}; write 1,2,4 or, doubling, 8..64")
    return list(dict.fromkeys(found))


def parse_bytes(text: str) -> int:
    """A size in bytes, with a unit: binary (KiB, MiB, GiB) or decimal (KB, MB, GB).

    >>> parse_bytes("80GiB") == 80 * GIB, parse_bytes("1.5 MB")
    (True, 1500000)

    Raises:
        ValueError: it is no size, or has no unit.
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d+)?) ?([kmg])(i?)b", text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"must be a size with a unit, got {text!r}; write 80GiB")
    thousand = 1024.0 if found[3] else 1000.0
    return round(float(found[1]) * thousand ** (1 + "kmg".index(found[2].lower())))


def format_bytes(n: float | None) -> str:
    """Bytes with three significant digits and a binary unit.

    >>> format_bytes(1536), format_bytes(3 * GIB), format_bytes(None)
    ('1.50 KiB', '3.00 GiB', '-')
    """
    if n is None:
        return "-"
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(n) >= size:
            return f"{_three_digits(n / size)} {unit}"
    return f"{n:.0f} B"


def format_part(n: float, of: float) -> str:
    """A part of some bytes; the unit is written once where both share it.

    >>> format_part(71.2 * GIB, 79.2 * GIB), format_part(640 * MIB, 79.2 * GIB)
    ('71.2 of 79.2 GiB', '640 MiB of 79.2 GiB')
    """
    part, whole = format_bytes(n), format_bytes(of)
    return f"{part.removesuffix(' ' + whole.rpartition(' ')[2])} of {whole}"


def format_seconds(s: float | None) -> str:
    """Seconds with three significant digits, as s, ms or us.

    >>> format_seconds(0.0123), format_seconds(75.0), format_seconds(0.9997), format_seconds(0)
    ('12.3 ms', '75.0 s', '1.00 s', '0 s')
    """
    if s is None:
        return "-"
    if s == 0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(s) >= 0.9995 * size:  # what rounds to 1,000 of a unit is 1.00 of the next
            return f"{_three_digits(math.copysign(max(1.0, abs(s) / size), s))} {unit}"
    return f"{s / 1e-9:.0f} ns"


def format_ns(ns: float | None) -> str:
    """Nanoseconds as :func:`format_seconds` writes seconds.

    >>> format_ns(12_300_000), format_ns(None)
    ('12.3 ms', '-')
    """
    return "-" if ns is None else format_seconds(ns / 1e9)


def format_duration(s: float) -> str:
    """Seconds as a person would say them, to the second or the minute.

    >>> format_duration(41.7), format_duration(130), format_duration(3900)
    ('42 s', '2 min 10 s', '1 h 05 min')
    """
    whole = round(s)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(s / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_rate(x: float | None) -> str:
    """A plain number with three significant digits and thousands separated.

    >>> format_rate(12345.6), format_rate(0.5)
    ('12,346', '0.500')
    """
    if x is None:
        return "-"
    return _three_digits(x)


def format_percent(x: float | None, digits: int = 1) -> str:
    """A fraction as a percentage.

    >>> format_percent(0.1234), format_percent(None)
    ('12.3 %', '-')
    """
    return "-" if x is None else f"{100 * x:.{digits}f} %"


def _three_digits(x: float) -> str:
    size = abs(x)
    if size >= 100:
        return f"{x:,.0f}"
    if size >= 10:
        return f"{x:.1f}"
    return f"{x:.2f}" if size >= 1 else f"{x:.3f}"


def format_times(count: int) -> str:
    """How often something happened.

    >>> format_times(1), format_times(1200)
    ('once', '1,200 times')
    """
    return "once" if count == 1 else f"{count:,} times"


def axis_unit(unit: Literal["s", "B"], largest: float) -> tuple[str, float]:
    """The unit that shows ``largest`` seconds or bytes as a number of at least 1, and its size.

    >>> axis_unit("B", 3 * 2**30), axis_unit("s", 0.04)
    (('GiB', 1073741824), ('ms', 0.001))
    """
    units = {"s": (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)), "B": (("GiB", GIB), ("MiB", MIB), ("KiB", KIB))}
    return next(((name, size) for name, size in units[unit] if largest >= size), (unit, 1.0))
