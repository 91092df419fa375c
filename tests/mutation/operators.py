"""Mechanical mutants: small changes to the syntax tree of a module, each with a number.

The standard library only: every interpreter that a test starts imports this before anything else.
"""

import ast
import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
}  # fmt: skip
# No number depends on these calls.
_TALK = {"debug", "info", "warning", "error", "exception", "emit", "print"}
_UNORDERED = {"isinstance", "getattr", "hasattr", "setattr", "zip", "max", "min", *_TALK}


@dataclass(frozen=True)
class Mutant:
    index: int  # among all of its module
    line: int
    kind: str  # comparison, constant, arithmetic, negation, statement or arguments
    was: str  # the changed piece of code
    becomes: str


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its text."""
    found = []
    for index, (node, kind, changed) in enumerate(_changes(ast.parse(source))):
        was, becomes = (" ".join(ast.unparse(each).split())[:80] for each in (node, changed))
        found.append(Mutant(index, node.lineno, kind, was, becomes))
    return found


def mutated(source: str, index: int) -> ast.Module:
    tree = ast.parse(source)
    node, _, changed = next(itertools.islice(_changes(tree), index, None))
    node.__class__, node.__dict__ = type(changed), {**vars(node), **vars(changed)}  # in place, whatever it is a part of
    return ast.fix_missing_locations(tree)


def traced(source: str) -> ast.Module:
    """The module with a call ``__mutant_line__(n)`` before every statement of a function that has mutants, n its line."""
    tree, lines = ast.parse(source), {mutant.line for mutant in mutants_of(source)}
    for node in [each for each in ast.walk(tree) if not isinstance(each, (ast.Module, ast.ClassDef))]:
        for field, value in ast.iter_fields(node):
            if isinstance(value, list) and all(isinstance(one, ast.stmt) for one in value):
                setattr(node, field, [each for one in value for each in (*_marks(one, lines), one)])
    return ast.fix_missing_locations(tree)


def _marks(statement: ast.stmt, lines: set[int]) -> Iterator[ast.Expr]:
    """One for each of the lines that are the statement's own, or inside its first line's expressions."""
    inner = getattr(statement, "body", None)
    end = max(inner[0].lineno, statement.lineno + 1) if inner else (statement.end_lineno or 0) + 1
    for line in sorted(lines & {*range(statement.lineno, end)}):
        mark = ast.Call(ast.Name("__mutant_line__", ast.Load()), [ast.Constant(line)], [])
        yield ast.copy_location(ast.Expr(mark), statement)


def _changes(tree: ast.Module) -> Iterator[tuple[Any, str, Any]]:
    """Nodes inside functions, with what becomes of each."""
    for function in _functions(tree):
        body = function.body[1:] if ast.get_docstring(function) is not None else function.body
        for statement in body:
            yield from _in_statement(statement)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """The outermost functions and methods; those within them belong to them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node)


def _in_statement(statement: ast.AST) -> Iterator[tuple[Any, str, Any]]:
    if isinstance(statement, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
        return
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        if _name(statement.value) in _TALK:
            return
        yield statement, "statement", ast.copy_location(ast.Pass(), statement)
    if isinstance(statement, ast.AugAssign):
        yield statement, "statement", ast.copy_location(ast.Pass(), statement)
    for node in ast.iter_child_nodes(statement):
        annotation = isinstance(statement, ast.AnnAssign) and node is statement.annotation
        if annotation or isinstance(node, (ast.JoinedStr, ast.arguments)):
            continue
        if not isinstance(node, (ast.stmt, ast.ExceptHandler)) and (change := _of_expression(node)) is not None:
            yield change
        yield from _in_statement(node)


def _of_expression(node: ast.AST) -> tuple[Any, str, Any] | None:
    changed: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        changed.ops[0] = _COMPARISONS[type(node.ops[0])]()
        return node, "comparison", changed
    if isinstance(node, ast.BoolOp):
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node, "comparison", changed
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node, "negation", node.operand
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
        changed.op = _ARITHMETIC[type(node.op)]()
        return node, "arithmetic", changed
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        changed.value = not node.value if isinstance(node.value, bool) else node.value + 1
        return node, "constant", changed
    if isinstance(node, ast.Call) and len(node.args) >= 2 and _name(node) not in _UNORDERED:
        first, second = node.args[:2]
        if not any(isinstance(a, ast.Starred) for a in (first, second)) and ast.dump(first) != ast.dump(second):
            changed.args[:2] = changed.args[1::-1]
            return node, "arguments", changed
    return None


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))
