"""Operators that make mutations: mutmut's, but those whose mutations only crash or say something else, and ours.

Each takes a node of the source's tree and yields nodes to put in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import libcst as cst
from mutmut.mutation import mutators

_LEFT_OUT = {
    mutators.operator_arg_removal,
    mutators.operator_assignment,
    mutators.operator_dict_arguments,
    mutators.operator_string,
}
_SAYS_ONLY = re.compile(r"(.*[._])?(log|logger|logging|complain|say|warn)(\.\w+)?")
_TEXTS = {"__repr__", "__str__"}
_PRECAUTIONS = {"frozen", "slots", "strict"}
_NO_CODE = (cst.Annotation, cst.Assert, cst.Decorator, cst.FormattedString, cst.Param)
_TRUE, _FALSE = cst.Name("True"), cst.Name("False")


def mutants(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield all mutants of a node."""
    for kind, operator in _OPERATORS:
        if isinstance(node, kind):
            yield from operator(node)


def is_left_out(node: cst.CSTNode) -> bool:
    """True for code in which a mutation would be no defect: types, defaults, texts, constants of a module."""
    if isinstance(node, cst.FunctionDef):
        return node.name.value in _TEXTS
    if isinstance(node, cst.If):
        return isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING"
    if isinstance(node, cst.Arg):
        return _name_of(node) in _PRECAUTIONS
    return isinstance(node, _NO_CODE) or _says_only(node)


def _says_only(node: cst.CSTNode) -> bool:
    called = node.value if isinstance(node, cst.Expr) else node
    return isinstance(called, cst.Call) and bool(_SAYS_ONLY.fullmatch(cst.Module([]).code_for_node(called.func)))


def _name_of(arg: cst.Arg) -> str:
    return arg.keyword.value if arg.keyword is not None else ""


def _condition(node: cst.If | cst.While | cst.CompIf) -> Iterator[cst.CSTNode]:
    """Take a condition for met, except a loop's, which would not end, and for not met."""
    if not isinstance(node, cst.While):
        yield node.with_changes(test=_TRUE)
    if not isinstance(node, cst.CompIf):
        yield node.with_changes(test=_FALSE)


def _operand(node: cst.BooleanOperation | cst.Call) -> Iterator[cst.CSTNode]:
    """Leave one operand of ``and``, ``or``, ``min`` or ``max``."""
    if isinstance(node, cst.BooleanOperation):
        yield from (node.left, node.right)
    elif isinstance(node.func, cst.Name) and node.func.value in {"max", "min"} and len(node.args) > 1:
        yield from (arg.value for arg in node.args if not arg.keyword and not arg.star)


def _argument(node: cst.Call) -> Iterator[cst.CSTNode]:
    """Leave out an argument with a name, which may have a default."""
    for number, arg in enumerate(node.args):
        if _name_of(arg) not in {"", *_PRECAUTIONS}:
            yield node.with_changes(args=[*node.args[:number], *node.args[number + 1 :]])


def _statement(node: cst.BaseSmallStatement) -> Iterator[cst.CSTNode]:
    """Leave out a call, a change of an object, or an error; without a name, what follows would only crash."""
    if isinstance(node, cst.Expr):
        is_one = isinstance(node.value, cst.Call | cst.Await)
    elif isinstance(node, cst.Assign):
        is_one = not any(isinstance(each.target, cst.Name | cst.Tuple) for each in node.targets)
    else:
        is_one = isinstance(node, cst.AugAssign | cst.Del | cst.Raise)
    if is_one:
        yield cst.Pass()


_OPERATORS: list[tuple[Any, Callable[[Any], Any]]] = [
    *(item for item in mutators.mutation_operators if item[1] not in _LEFT_OUT),
    (cst.If | cst.While | cst.CompIf, _condition),
    (cst.BooleanOperation | cst.Call, _operand),
    (cst.Call, _argument),
    (cst.BaseSmallStatement, _statement),
]
