"""Changes that a function's syntax tree allows, each of which is a fault: what generated ones are.

A change is made in place. Its kind and its number among those of its kind name it, in the order of
the source: other names in the function, and other functions, change nothing about it.
"""

import ast
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

_TEXT = {"warn", "warning", "info", "debug", "log", "cast", "isinstance", "print", "TypeVar"}
_EITHER_WAY = {
    "min", "max", "equal", "allclose", "maximum", "minimum", "promote_types", "logaddexp", "gcd",
}  # fmt: skip
_NO_MATTER = {"strict", "stacklevel", "non_blocking", "device"}  # keywords that no CPU test sees
_OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}
_OTHER_COMPARISON = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OTHER_SIGN = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_HAVE_A_LEFT = ast.Add | ast.Sub | ast.Mult | ast.FloorDiv | ast.Mod
_METHODS = {
    "abs", "clamp", "clamp_", "clone", "contiguous", "copy", "detach", "double", "flip", "float",
    "masked_fill", "masked_fill_", "roll", "to",
}  # fmt: skip
_FUNCTIONS = {"abs", "sorted", "reversed"}


class Change(NamedTuple):
    """`make` changes the tree in place; `at` is the expression or statement that it is made in."""

    kind: str
    at: ast.AST
    make: Callable[[], None]


def changes(function: ast.FunctionDef) -> Iterator[Change]:
    """All of a function's body, in the order of the source; make one of them only."""
    for statement in function.body:
        yield from _within(statement)


def _within(node: ast.AST) -> Iterator[Change]:
    if _is_text(node):
        return
    for rule in _RULES:
        yield from rule(node)
    for child in _children(node):
        yield from _within(child)


def _is_text(node: ast.AST) -> bool:
    """True for text that people or type checkers read: errors, f-strings, annotations."""
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__repr__", "__str__")
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.Call):
        return _name(node.func) in _TEXT
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _become(node: ast.AST, other: ast.AST) -> None:
    """In place, so that whoever holds the node holds the other."""
    at = {name: getattr(node, name) for name in ("lineno", "col_offset") if hasattr(node, name)}
    node.__class__ = other.__class__
    fields = {**vars(other)}
    vars(node).clear()
    vars(node).update(at | fields)


def _becomes(kind: str, node: ast.AST, other: ast.AST) -> Change:
    return Change(kind, node, lambda: _become(node, other))


# --- statements ---


def _dropped(node: ast.AST) -> Iterator[Change]:
    """A call, an assignment to what others see, a jump."""
    match node:
        case ast.Expr(value=ast.Call() as call) if not _is_text(call):
            yield _becomes("call dropped", node, ast.Pass())
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield _becomes("assignment dropped", node, ast.Pass())
        case ast.Assign() if _names(node.targets, ast.Store) <= _names([node.value], ast.Load):
            yield _becomes("assignment dropped", node, ast.Pass())  # what was there is still there
        case ast.Delete(targets=[ast.Attribute() | ast.Subscript()]):
            yield _becomes("assignment dropped", node, ast.Pass())
        case ast.Break() | ast.Continue():
            yield _becomes("jump dropped", node, ast.Pass())
        case ast.With(items=items):
            for item in items:
                if item.optional_vars is None:
                    nothing = ast.parse("__import__('contextlib').nullcontext()").body[0].value
                    yield _becomes("context dropped", item.context_expr, nothing)


def _names(nodes: list[ast.expr], context: type[ast.expr_context]) -> set[str]:
    found = (each for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name))
    return {each.id for each in found if isinstance(each.ctx, context)}


def _conditions(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.If() | ast.IfExp():
            yield _becomes("never", node.test, ast.Constant(False))
            yield _becomes("always", node.test, ast.Constant(True))
        case ast.Return(value=ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()) as value):
            yield _becomes("never", value, ast.Constant(False))
            yield _becomes("always", value, ast.Constant(True))
        case ast.While():
            yield _becomes("never", node.test, ast.Constant(False))
        case ast.comprehension():
            for test in node.ifs:
                yield _becomes("always", test, ast.Constant(True))


# --- expressions ---


def _operators(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                other = _OTHER_COMPARISON[type(op)]()
                yield Change("comparison", node, lambda i=i, to=other: ops.__setitem__(i, to))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield _becomes("not dropped", node, operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield _becomes("minus dropped", node, operand)
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
            yield _becomes("condition dropped", node, node.left)
            yield _becomes("condition dropped", node, node.right)
        case ast.BinOp() if not _is_joined(node):
            if other := _OTHER_SIGN.get(type(node.op)):
                yield Change("sign", node, lambda: setattr(node, "op", other()))
            if isinstance(node.op, _HAVE_A_LEFT):
                yield _becomes("right dropped", node, node.left)
        case ast.BoolOp(values=values):
            for i in range(len(values)):
                left = values[:i] + values[i + 1 :]
                other = left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
                yield _becomes("condition dropped", node, other)


def _is_joined(node: ast.BinOp) -> bool:
    """True for a sum of texts, or of lists and tuples written out."""
    sides = ast.List | ast.Tuple | ast.JoinedStr
    return any(
        isinstance(side, sides) or isinstance(getattr(side, "value", None), str)
        for side in (node.left, node.right)
    )


def _numbers(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Constant(value=bool() as value):
            yield _becomes("bool", node, ast.Constant(not value))
        case ast.Constant(value=int() as value):
            yield _becomes("off by one", node, ast.Constant(value + 1))
        case ast.Slice(lower=lower, upper=upper):
            for bound in (lower, upper):
                if bound is not None and not _is_number(bound):
                    yield _becomes("off by one", bound, _plus(bound, ast.Add()))
        case ast.Call(func=ast.Name(id="range"), args=args):
            for bound in args[:2]:
                if not _is_number(bound):
                    yield _becomes("off by one", bound, _plus(bound, ast.Sub()))


def _is_number(node: ast.AST) -> bool:
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


def _plus(node: ast.expr, op: ast.operator) -> ast.BinOp:
    same = type(node)(**{name: value for name, value in ast.iter_fields(node)})
    return ast.BinOp(same, op, ast.Constant(1))


def _calls(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Return(value=ast.Tuple() as pair) | ast.Assign(value=ast.Tuple() as pair):
            yield from _swaps(pair)
        case ast.Call():
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[Change]:
    name, args = _name(node.func), node.args
    if name not in _EITHER_WAY:
        yield from _swaps(node)
        for pair in args:
            if isinstance(pair, ast.Tuple):
                yield from _swaps(pair)
    for keyword in node.keywords:
        if keyword.arg and keyword.arg not in _NO_MATTER:
            left = [each for each in node.keywords if each is not keyword]
            yield Change("default", node, lambda to=left: setattr(node, "keywords", to))
    if isinstance(node.func, ast.Name) and name in _OTHER_NAME:
        yield Change("other end", node, lambda: setattr(node.func, "id", _OTHER_NAME[name]))
    if isinstance(node.func, ast.Attribute) and name in _METHODS:
        yield _becomes("function dropped", node, node.func.value)
    if isinstance(node.func, ast.Name) and name in _FUNCTIONS and args:
        yield _becomes("function dropped", node, args[0])


def _swaps(node: ast.Call | ast.Tuple) -> Iterator[Change]:
    """Swap neighbours that are names."""
    items = node.args if isinstance(node, ast.Call) else node.elts
    for i, (a, b) in enumerate(pairwise(items)):
        names = all(isinstance(each, ast.Name | ast.Attribute) for each in (a, b))
        if names and ast.dump(a) != ast.dump(b):
            yield Change("swapped", node, partial(items.__setitem__, slice(i, i + 2), [b, a]))


_RULES = (_dropped, _conditions, _operators, _numbers, _calls)
