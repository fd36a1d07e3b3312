"""A trace file as a stream of events, with memory for some blocks of it, however large it is.

Kineto writes one JSON object whose ``traceEvents`` array is nearly all of the file. It is read block by block. Where
to cut a block is guessed, at the last ``},{``, and the decoder itself proves the guess: a slice of an array from the
start of one element decodes, closed by a bracket, if and only if it was cut between two elements. A cut within a
string or a nested object leaves something open, which the decoder calls truncated, and the next guess is tried.
"""

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISREG
from types import TracebackType
from typing import IO, Generic, TypeVar, cast

import msgspec

from refshard.errors import TraceError
from refshard.quantities import MIB, format_bytes

BLOCK = 2 * MIB
LARGEST_EVENT = 64 * MIB
"""An event, or what stands before the events, may not be longer: it has to be in memory as a whole."""
LARGEST_EXPANSION = 300
"""Times its size that a gzip file may expand to, past :data:`LARGEST_EVENT`. Real traces reach 10 to 40."""

_GUESSES, _SEARCHED = 4, MIB // 4
_BETWEEN = re.compile(rb"\}\s*+,\s*+\{")
_SKIPPED = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["\[\]{}]', re.DOTALL)
_AFTER_KEY = re.compile(rb"\s*(:?)\s*(\[?)")
_NOT_JSON = re.compile(
    rb'"(?:[^"\\]++|\\.)*+"|-?\b(?:nan|NaN|inf|Inf|infinity|Infinity)\b|,(?=[ \t\r\n]*+[\]}])', re.DOTALL
)
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_BYTE = re.compile(r"\(byte (\d+)\)")
_EMPTY = b" \t\r\n"

T = TypeVar("T")


class EventStream(Generic[T]):
    """Iterate over lists of decoded events; a context manager.

    ``decoder`` decodes a JSON array of events. ``salvage`` returns the usable events of a block that is valid JSON but
    of unexpected types; it raises msgspec.DecodeError if it is no JSON. When the iteration has ended, ``metadata`` is
    the file's object without its events, as JSON, and ``not_numbers`` says how often NaN or infinity stood where JSON
    has null, ``trailing_commas`` how many commas stood before a closing bracket, and ``is_unclosed`` whether an array
    that is the whole file ended without its bracket. Chrome's format allows both. ``block`` bytes are read at a time.

    Raises:
        TraceError: the file cannot be read, is no trace, is damaged or truncated, or expands as no trace does.
    """

    def __init__(
        self,
        path: Path,
        decoder: "msgspec.json.Decoder[list[T]]",
        salvage: Callable[[bytes], list[T]],
        *,
        block: int = BLOCK,
    ) -> None:
        self.metadata = b"{}"
        self.not_numbers = 0
        self.trailing_commas = 0
        self.is_unclosed = False
        self.size = 0
        self._path = path
        self._block = block
        self._decoder = decoder
        self._salvage = salvage
        self._offset = 0
        try:
            status = path.stat()
            if not S_ISREG(status.st_mode):
                raise TraceError(f"{path}: is no regular file (a folder, pipe or device); name a trace file")
            self._compressed_size = status.st_size
            self._raw: IO[bytes] = path.open("rb")
            packed = self._raw.read(2) == b"\x1f\x8b"
            self._raw.seek(0)
        except OSError as error:
            raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
        self._file: IO[bytes] = cast(IO[bytes], gzip.GzipFile(fileobj=self._raw)) if packed else self._raw
        self._packed = packed

    def __enter__(self) -> "EventStream[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._raw.close()

    def __iter__(self) -> Iterator[list[T]]:
        rest, is_object = self._find_events()
        prefix = self.metadata
        while True:
            fresh = self._read()
            block, rest = rest + fresh, b""
            if not block.strip(_EMPTY) and not is_object:
                self.is_unclosed = True
                return
            if not block.strip(_EMPTY):
                raise self._truncated()
            events, used, tail = self._decode_some(block, at_end=not fresh, is_object=is_object)
            self._offset += used
            if events:
                yield events
            if tail is None:
                rest = block[used:]
                continue
            self.metadata = self._finish(prefix, tail, is_object=is_object)
            return

    def _read(self) -> bytes:
        try:
            found = self._file.read(self._block)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{self._path}: truncated or damaged gzip ({error}); copy or record it again") from None
        except OSError as error:
            raise TraceError(f"{self._path}: cannot be read ({error.strerror or error})") from None
        self.size += len(found)
        limit = max(LARGEST_EVENT, LARGEST_EXPANSION * self._compressed_size)
        if self._packed and self.size > limit:
            raise TraceError(
                f"{self._path}: {format_bytes(self._compressed_size)} of gzip expand to more than "
                f"{format_bytes(limit)}, too much for a trace; if it is a trace, decompress it first"
            )
        return found

    def _find_events(self) -> tuple[bytes, bool]:
        """What follows the bracket that opens the events, and whether that array stands in an object."""
        head, place, depth = self._read().removeprefix(b"\xef\xbb\xbf"), 0, 0
        first = head.lstrip(_EMPTY)[:1]
        if first == b"[":
            return head.partition(b"[")[2], False
        if head.startswith(_LFS_POINTER):
            raise TraceError(
                f"{self._path}: is a Git LFS pointer, not the trace itself; fetch the trace with: git lfs pull"
            )
        if first != b"{":
            raise TraceError(f"{self._path}: not a Kineto trace (it is {'empty' if not first else 'no JSON object'})")
        while True:
            for token in _SKIPPED.finditer(head, place):
                text = token[0]
                if text == b'"':  # a string that ends in the next block
                    break
                place = token.end()
                if depth == 1 and text == b'"traceEvents"':
                    following = _AFTER_KEY.match(head, place)
                    assert following is not None
                    if following.end() == len(head) and not following[2]:  # what it is comes with the next block
                        place = token.start()
                        break
                    if following[2]:
                        self.metadata, self._offset = head[: token.start()], following.end()
                        return head[following.end() :], True
                    if following[1]:
                        raise TraceError(f"{self._path}: not a Kineto trace (traceEvents must be an array)")
                depth += (text in b"{[") - (text in b"}]")
                if depth == 0:
                    raise TraceError(f"{self._path}: not a Kineto trace (it has no traceEvents)")
            fresh = self._read()
            if not fresh:
                raise TraceError(f"{self._path}: not a Kineto trace (it ends before any traceEvents)")
            if len(head) > LARGEST_EVENT:
                raise TraceError(f"{self._path}: not a Kineto trace (no events in its first {format_bytes(len(head))})")
            head += fresh

    def _decode_some(self, block: bytes, *, at_end: bool, is_object: bool) -> tuple[list[T], int, bytes | None]:
        """Events at the start of ``block``, how many bytes they took, and what follows the array if it ends there."""
        first = max(0, len(block) - _SEARCHED)
        # Places after a "}" that a comma and a "{" follow, from the last one.
        places = [first + match.start() + 1 for match in _BETWEEN.finditer(block[first:])]
        for cut in reversed(places[-_GUESSES:]):
            try:
                events, tail = self._decode(block[:cut], b"]")
            except _Truncated:
                continue
            if tail is None:
                return events, block.index(b",", cut) + 1, None
            return events, cut, tail + block[cut:] + self._remainder()
        if not at_end and len(block) <= LARGEST_EVENT:
            return [], 0, None
        try:
            events, tail = self._decode(block, b"")
        except _Truncated:
            if at_end and not is_object:  # an array that is never closed, if its last event is whole
                try:
                    events, _ = self._decode(block.rstrip(_EMPTY).removesuffix(b","), b"]")
                except (_Truncated, TraceError):  # not an error of the file itself
                    raise self._truncated() from None
                self.is_unclosed = True
                return events, len(block), b""
            if at_end:
                raise self._truncated() from None
            raise TraceError(
                f"{self._path}: not a Kineto trace (an event at byte {self._offset} is longer than "
                f"{format_bytes(LARGEST_EVENT)})"
            ) from None
        return events, len(block), (tail or b"") + self._remainder()

    def _decode(self, elements: bytes, closing: bytes) -> tuple[list[T], bytes | None]:
        """The events of an array after its bracket, and what of ``elements`` follows if the array ends before them."""
        text = b"".join((b"[", elements, closing))
        try:
            return self._decoder.decode(text), None
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
            if (place := _end_of_array(error)) is not None:
                return self._decode(text[1 : place - 1], b"]")[0], text[place : len(text) - len(closing)]
        cleaned, numbers, commas = _as_json(text)
        try:
            events, tail = self._salvage(cleaned), None
        except (msgspec.DecodeError, RecursionError) as error:
            if (place := _end_of_array(error)) is None:
                at = _BYTE.search(str(error))
                where = f" at byte {self._offset + int(at[1]) - 1}" if at else ""
                reason = str(error).removeprefix("JSON is malformed: ").partition(" (byte")[0]
                raise TraceError(f"{self._path}: damaged{where} ({reason}); copy or record it again") from None
            events, tail = self._salvage(cleaned[:place]), cleaned[place : len(cleaned) - len(closing)]
        self.not_numbers += numbers
        self.trailing_commas += commas
        return events, tail

    def _remainder(self) -> bytes:
        """All that follows the events, in memory: no more than some metadata is expected."""
        rest = b""
        while fresh := self._read():
            rest += fresh
            if len(rest) > LARGEST_EVENT:
                raise TraceError(f"{self._path}: not a Kineto trace (over {format_bytes(len(rest))} follow its events)")
        return rest

    def _finish(self, prefix: bytes, tail: bytes, *, is_object: bool) -> bytes:
        """The file's object without its events."""
        tail = tail.strip(_EMPTY)
        if not is_object:
            if tail:
                raise TraceError(f"{self._path}: damaged at byte {self._offset} (more follows the events' array)")
            return b"{}"
        if not tail:
            raise self._truncated()
        text, numbers, commas = _as_json(prefix + b'"":null' + tail)
        try:
            keys = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise TraceError(
                f"{self._path}: damaged before or after its events (not a JSON object); copy or record it again"
            ) from None
        if "traceEvents" in keys:
            raise TraceError(f"{self._path}: holds traceEvents twice; a trace has them once, so split the file in two")
        self.not_numbers += numbers
        self.trailing_commas += commas
        return text

    def _truncated(self) -> TraceError:
        return TraceError(
            f"{self._path}: truncated: it ends within its events, after {format_bytes(self.size)}; "
            "copy or record it again"
        )


class _Truncated(Exception):  # noqa: N818
    """The text ends within an element."""


def _end_of_array(error: Exception) -> int | None:
    """Where an array ended in a text that goes on; None for any other error.

    Raises:
        _Truncated: the text ended first.
    """
    message = str(error)  # only its start is the decoder's own: the rest may quote the file
    if message.startswith("Input data was truncated"):
        raise _Truncated
    if message.startswith("JSON is malformed: trailing characters") and (at := _BYTE.search(message)):
        return int(at[1]) - 1  # the first of those characters, counted from 1
    return None


def _as_json(text: bytes) -> tuple[bytes, int, int]:
    """Valid UTF-8 with null for NaN and infinities outside of strings, and without commas before a closing bracket.

    Says too how many of each there were.
    """
    numbers = commas = 0

    def replace(token: "re.Match[bytes]") -> bytes:
        nonlocal numbers, commas
        if token[0].startswith(b'"'):
            return token[0]
        if token[0] == b",":
            commas += 1
            return b""
        numbers += 1
        return b"null"

    text = text.decode("utf-8", "replace").encode()
    return _NOT_JSON.sub(replace, text), numbers, commas
