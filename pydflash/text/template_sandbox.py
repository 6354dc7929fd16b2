"""A Jinja environment for chat templates, which come out of model files and are not trusted.

On top of Jinja's immutable sandbox it bounds work: loop iterations, calls and processor time are counted, and no text,
list or number may grow beyond a limit. Endless and exponential templates end within seconds. It is no memory jail: a
single operation may build one oversized value before that is refused.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
MAX_CHARACTERS = 16 * 2**20
MAX_ITEMS = 1_000_000
MAX_INTEGER_BITS = 4096

# Names that no template can write, because they are no identifiers.
_COUNT = "count the iterations"
_BOUND = "bound the value"

# A width or precision of five digits or more, or one that comes from an argument, in either way of formatting.
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)|\{[^{}]*:[^{}]*(?:\d{5}|\{)")


class _Budget:
    """What one rendering may still use."""

    __slots__ = ("deadline", "steps")

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.deadline = time.thread_time() + MAX_SECONDS

    def spend(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateError(f"more than {MAX_STEPS} loop iterations and calls")
        if self.steps % 16 == 0 and time.thread_time() > self.deadline:
            raise TemplateError(f"more than {MAX_SECONDS:g} seconds of processor time")


_budget: ContextVar[_Budget] = ContextVar("pydflash_template_budget")


@contextmanager
def budget() -> Iterator[None]:
    """Give the template that runs inside MAX_STEPS and MAX_SECONDS of this thread."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def _counted(iterable: Iterable[object]) -> Iterator[object]:
    left = _budget.get()
    for item in iterable:
        left.spend()
        yield item


def _bounded(value: object) -> object:
    if isinstance(value, str):
        if len(value) > MAX_CHARACTERS:
            raise TemplateError(f"a text of {len(value)} characters, at most {MAX_CHARACTERS} are allowed")
    elif isinstance(value, list | tuple | dict):
        if len(value) > MAX_ITEMS:
            raise TemplateError(f"a collection of {len(value)} items, at most {MAX_ITEMS} are allowed")
    elif isinstance(value, int):
        _bounded_bits(value.bit_length())
    return value


def _bounded_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise TemplateError(f"an integer of {bits} bits, at most {MAX_INTEGER_BITS} are allowed")


def _bounded_arguments(arguments: Iterable[object]) -> None:
    """Widths and counts are arguments: a large one makes a huge text in one call."""
    for value in arguments:
        if isinstance(value, int) and abs(value) > MAX_CHARACTERS:
            raise TemplateError(f"the number {value} as an argument, at most {MAX_CHARACTERS} is allowed")


def _bounded_format(pattern: object) -> None:
    if isinstance(pattern, str) and (wide := _WIDE_FORMAT.search(pattern)):
        raise TemplateError(f"the format {wide.group()!r}, widths above 9999 or from arguments are not allowed")


def _format(value: str, *args: object, **kwargs: object) -> str:
    _bounded_format(value)
    return do_format(value, *args, **kwargs)


def _bounded_filter(function: Callable[..., object]) -> Callable[..., object]:
    # wraps() also copies the mark by which Jinja knows that a filter wants its context.
    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        _bounded_arguments((*args, *kwargs.values()))
        return _bounded(function(*args, **kwargs))

    return call


def _concat(parts: Iterable[str]) -> str:
    kept: list[str] = []
    length = 0
    for part in parts:
        length += len(part)
        if length > MAX_CHARACTERS:
            raise TemplateError(f"more than {MAX_CHARACTERS} characters of output")
        kept.append(part)
    return "".join(kept)


class _Namespace(Namespace):
    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"{name!r} may not be set on a namespace")


def _dict(*args: object, **kwargs: object) -> dict[str, object]:
    return dict(*args, **kwargs)


def _namespace(*args: object, **kwargs: object) -> Namespace:
    attributes = _dict(*args, **kwargs)
    for name in attributes:
        _check_name(name)
    return _Namespace(attributes)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on: not escaped for HTML, keys in their own order."""
    pair = None if separators is None else cast("tuple[str, str]", tuple(separators))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; here only its content matters."""

    tags = {"generation"}  # noqa: RUF012 - declared like this by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Limiter(NodeTransformer):
    """Routes what Jinja compiles to plain Python through the checks above."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNT, [], [], None, None, lineno=node.iter.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        return nodes.Filter(node, _BOUND, [], [], None, None, lineno=node.lineno)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """What Hugging Face's chat templates expect, within limits.

    Block trimming, ``break`` and ``continue``, ``tojson``, ``raise_exception``, ``strftime_now``, ``namespace`` and
    ``{% generation %}`` as in ``transformers``. ``clock`` supplies the time for ``strftime_now``.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_concat)

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters["format"] = _format
        self.filters.update({name: _bounded_filter(function) for name, function in self.filters.items()})
        self.filters[_COUNT] = _counted
        self.filters[_BOUND] = _bounded
        del self.globals["lipsum"]
        self.globals.update(
            {
                "raise_exception": _raise_exception,
                "strftime_now": lambda pattern: clock().strftime(pattern),
                "namespace": _namespace,
                "dict": _dict,
            }
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Limiter().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if operator == "*":
            for factor, other in ((left, right), (right, left)):
                if isinstance(factor, int) and isinstance(other, str | list | tuple):
                    limit = MAX_CHARACTERS if isinstance(other, str) else MAX_ITEMS
                    if factor * len(other) > limit:
                        raise TemplateError(f"a repetition of {factor} times {len(other)}, at most {limit} in all")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            # The length of the result, before it is computed.
            _bounded_bits(left.bit_length() * right)
        elif operator == "%":
            _bounded_format(left)
        return _bounded(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _bounded_format(getattr(value, "__self__", None))
        return wrapped

    def call(self, context: Context, function: object, /, *args: object, **kwargs: object) -> object:
        _budget.get().spend()
        _bounded_arguments((*args, *kwargs.values()))
        if isinstance(function, LoopContext) and args:  # a recursive loop calls itself with the next level
            args = (_counted(cast("Iterable[object]", args[0])), *args[1:])
        return _bounded(super().call(context, function, *args, **kwargs))
