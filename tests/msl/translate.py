"""Metal Shading Language to C++: erase what C++ has no word for, and read the kernels' signatures on the way.

Address-space words go, threadgroup variables become statics in a section of their own, attributes are read and dropped,
and function constants get their values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

BUILTINS = frozenset(
    (
        *("thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid"),
        *("threads_per_grid", "threads_per_threadgroup", "dispatch_threads_per_threadgroup", "threadgroups_per_grid"),
        *("grid_size", "grid_origin", "thread_index_in_threadgroup", "thread_index_in_simdgroup"),
        *("simdgroup_index_in_threadgroup", "thread_index_in_quadgroup", "quadgroup_index_in_threadgroup"),
        *("threads_per_simdgroup", "thread_execution_width", "simdgroups_per_threadgroup"),
        *("quadgroups_per_threadgroup", "dispatch_simdgroups_per_threadgroup", "dispatch_quadgroups_per_threadgroup"),
    )
)

SHARED = 'static __attribute__((used, section("msl_threadgroup")))'
ADDRESS_SPACES = {"device": "", "thread": "", "constant": "const"}
"""What is left of each in C++. Memory in the constant space cannot be written."""
ACCESS = (".", "->", "::")

_TOKEN = re.compile(
    r"""\#[^\n]*\n | //[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*'
      | [A-Za-z_]\w* | \d[\w.]* | \s+ | :: | -> | \[\[ | \]\] | .""",
    re.DOTALL | re.VERBOSE,
)
_WORD = re.compile(r"[A-Za-z_]\w*$")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: a built-in by name, or a buffer by index."""

    builtin: str | None
    buffer: int | None


Kernels = dict[str, list[Parameter]]


def translate(text: str, constants: Mapping[int, int | float | bool] | None = None) -> tuple[str, Kernels]:
    """C++ for MSL text, and the parameters of every kernel in it.

    Args:
        text: preprocessed MSL.
        constants: values of function constants by index; absent ones are 0.
    """
    source = _Source(_tokens(text))
    source.read_attributes(constants or {})
    source.erase()
    return source.text(), source.kernels


def _tokens(text: str) -> list[str]:
    """Tokens; `]]` that closes two subscripts rather than an attribute is two tokens."""
    found: list[str] = []
    open_attributes = 0
    for token in _TOKEN.findall(text):
        if token == "]]" and not open_attributes:
            found += ["]", "]"]
            continue
        open_attributes += (token == "[[") - (token == "]]")
        found.append(token)
    return found


class _Source:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.dropped = [False] * len(tokens)
        self.kernels: Kernels = {}

    def text(self) -> str:
        return "".join(token for token, gone in zip(self.tokens, self.dropped, strict=True) if not gone)

    def read_attributes(self, constants: Mapping[int, int | float | bool]) -> None:
        for start, stop in self._attributes():
            inner = "".join(self.tokens[start + 1 : stop]).strip()
            self.dropped[start : stop + 1] = [True] * (stop + 1 - start)
            constant = re.match(r"function_constant\((\d+)\)", inner)
            if constant and self._at(stop, 1) == ";":
                self.tokens[stop] = f" = {constants.get(int(constant[1]), 0):d}"
                self.dropped[stop] = False
            if re.match(r"kernel\b", inner) and not self._in_instantiation(start):
                self._read_signature(stop + 1)

    def erase(self) -> None:
        place = 0
        while place < len(self.tokens):
            token = self.tokens[place]
            if self.dropped[place] or token.isspace():
                pass
            elif token == "template" and self._at(place, -1) not in ACCESS and self._at(place, 1) != "<":
                stop = self.tokens.index(";", place)
                self.dropped[place : stop + 1] = [True] * (stop + 1 - place)
                place = stop
            elif token in ADDRESS_SPACES:
                self.tokens[place] = ADDRESS_SPACES[token]
            elif token == "threadgroup":
                self.tokens[place] = SHARED if self._declares_variable(place) else ""
            place += 1

    def _attributes(self) -> Iterator[tuple[int, int]]:
        place = 0
        while place < len(self.tokens):
            if self.tokens[place] == "[[":
                stop = self.tokens.index("]]", place)
                yield place, stop
                place = stop
            place += 1

    def _neighbour(self, place: int, step: int) -> int | None:
        place += step
        while 0 <= place < len(self.tokens):
            if not self.tokens[place].isspace():
                return place
            place += step
        return None

    def _at(self, place: int, step: int) -> str | None:
        neighbour = self._neighbour(place, step)
        return None if neighbour is None else self.tokens[neighbour]

    def _in_instantiation(self, place: int) -> bool:
        """Whether the statement at `place` is `template [[...]] ... f<...>;`, which defines nothing."""
        while place > 0 and self.tokens[place] != "template" and self.tokens[place - 1] not in (";", "{", "}"):
            place -= 1
        return self.tokens[place] == "template" and self._at(place, 1) != "<"

    def _declares_variable(self, place: int) -> bool:
        """Whether the word `threadgroup` begins a variable; else it qualifies a pointer, reference or method."""
        before = self._neighbour(place, -1)
        while before is not None and self.tokens[before] in ("const", "volatile"):
            before = self._neighbour(before, -1)
        if before is not None and self.tokens[before] == ")":
            return False
        depth = 0
        for token in self.tokens[place + 1 :]:
            if token in ("<", "("):
                depth += 1
            elif token in (">", ")"):
                if depth == 0:
                    return False
                depth -= 1
            elif depth == 0 and token in ("*", "&", ",", ";", "=", "[", "{"):
                return token in (";", "=", "[", "{")
        return False

    def _read_signature(self, place: int) -> None:
        """From just past `[[kernel]]`: `void name(parameters)`."""
        opening = place
        while self.tokens[opening] != "(":
            opening = self.tokens.index("]]", opening) + 1 if self.tokens[opening] == "[[" else opening + 1
        name = next(token for token in reversed(self.tokens[place:opening]) if _WORD.match(token))
        self.kernels[name] = _parameters(self._parameter_texts(opening + 1))

    def _parameter_texts(self, place: int) -> Iterator[list[str]]:
        """The tokens of each parameter, an attribute in one piece."""
        depth, parameter = 0, []
        while True:
            token = self.tokens[place]
            if token == "[[":
                stop = self.tokens.index("]]", place)
                parameter.append("".join(self.tokens[place : stop + 1]))
                place = stop + 1
                continue
            if depth == 0 and token in (",", ")"):
                if "".join(parameter).strip():
                    yield parameter
                parameter = []
                if token == ")":
                    return
            else:
                depth += (token in "(<[") - (token in ")>]")
                parameter.append(token)
            place += 1


def _parameters(texts: Iterator[Sequence[str]]) -> list[Parameter]:
    found, next_buffer = [], 0
    for text in texts:
        attributes = set(re.findall(r"\w+", " ".join(token for token in text if token.startswith("[["))))
        builtin = next(iter(attributes & BUILTINS), None)
        if builtin is not None:
            found.append(Parameter(builtin, None))
            continue
        given = re.search(r"buffer\((\d+)\)", " ".join(text))
        buffer = int(given[1]) if given else next_buffer
        next_buffer = buffer + 1
        found.append(Parameter(None, buffer))
    return found
