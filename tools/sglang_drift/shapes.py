"""What can be told of the contract from source text alone.

A contract is read into sections (a class, the factory, the calls on a backend, ...), each a
mapping of members to a text that says all of a member that must match. Order is kept.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

Section = dict[str, str]
Contract = dict[str, Section]

REQUIRED = "required"
"""The text of a dataclass field without a default."""

CALLS = "calls on a backend"
EXTRA_KEYS = "keys of the extra config"
NAMES = "in-tree names with rights of their own"
CONSTANTS = "constants"

BACKEND_NAMES = (
    "allocator_type",
    "hicache_storage_backend",
    "storage_backend",
    "storage_backend_type",
)
"""Variables and attributes in which SGLang keeps the name of the storage backend."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def dataclass_shape(node: ast.ClassDef) -> Section:
    """Fields in order with their defaults, and the names of properties and methods."""
    fields = {
        item.target.id: REQUIRED if item.value is None else f"= {ast.unparse(item.value)}"
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    return {**fields, **methods_shape(node)}


def enum_shape(node: ast.ClassDef) -> Section:
    """Members with their values."""
    return {
        target.id: f"= {ast.unparse(item.value)}"
        for item in node.body
        if isinstance(item, ast.Assign)
        for target in item.targets
        if isinstance(target, ast.Name)
    }


def methods_shape(node: ast.ClassDef) -> Section:
    """Public methods with their parameters: names, order, defaults, decorators."""
    return {
        item.name: function_shape(item)
        for item in node.body
        if isinstance(item, Function) and not item.name.startswith("_")
    }


def function_shape(node: Function) -> str:
    """``abstractmethod (self, key, target=None)``: no annotations, whose spelling varies."""
    plain = ast.parse(ast.unparse(node)).body[0]
    for part in ast.walk(plain):
        if isinstance(part, ast.arg):
            part.annotation = None
    words = [ast.unparse(decorator) for decorator in node.decorator_list]
    arguments = ast.unparse(plain.args) if isinstance(plain, Function) else ""
    return " ".join([*words, f"({arguments})"])


def classes(source: str, names: Iterable[str]) -> dict[str, ast.ClassDef]:
    """The named classes of a module; those that it lacks are left out."""
    wanted = set(names)
    return {
        node.name: node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in wanted
    }


def class_shapes(source: str, names: Iterable[str]) -> Contract:
    """Sections of the named classes: enums by their members, others by fields and methods."""
    return {
        name: enum_shape(node) if _is_enum(node) else dataclass_shape(node)
        for name, node in classes(source, names).items()
    }


def _is_enum(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] == "Enum" for base in node.bases)


def constant(source: str, name: str) -> str | None:
    """The text of a module's constant."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            return f"= {ast.unparse(node.value)}"
    return None


def backend_calls(sources: Iterable[str]) -> Section:
    """How ``storage_backend.method(...)`` is called: the number of arguments and their names.

    One member a form, as ``batch_get_v2(_, extra_info=_)``.
    """
    forms = {
        _form(node)
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value).rpartition(".")[2] == "storage_backend"
    }
    return dict.fromkeys(sorted(forms), "called")


def _form(call: ast.Call) -> str:
    arguments = ["*_" if isinstance(argument, ast.Starred) else "_" for argument in call.args]
    arguments += [f"{word.arg}=_" if word.arg else "**_" for word in call.keywords]
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return f"{method}({', '.join(arguments)})"


def extra_keys(sources: Iterable[str]) -> Section:
    """Keys that SGLang takes from the extra config by ``pop`` or ``get``."""
    keys = {
        str(node.args[0].value)
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("pop", "get")
        and ast.unparse(node.func.value).endswith("extra_config")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    return dict.fromkeys(sorted(keys), "read")


def rights_of_names(sources: Iterable[str], names: Iterable[str]) -> Section:
    """Functions that compare a storage backend's name with one of ``names``, and with which."""
    wanted = set(names)
    found: dict[str, set[str]] = {}
    for source in sources:
        for function, node in _in_functions(ast.parse(source), ""):
            if isinstance(node, ast.Compare) and _is_backend_name(node.left):
                literals = {
                    str(part.value)
                    for other in node.comparators
                    for part in ast.walk(other)
                    if isinstance(part, ast.Constant)
                }
                if literals & wanted:
                    found.setdefault(function, set()).update(literals & wanted)
    return {name: ", ".join(sorted(found[name])) for name in sorted(found)}


def _is_backend_name(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] in BACKEND_NAMES


def _in_functions(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node with the innermost function around it."""
    for child in ast.iter_child_nodes(node):
        name = child.name if isinstance(child, Function) else function
        yield name, child
        yield from _in_functions(child, name)


def factory_shape(source: str, made: Mapping[str, str]) -> Section:
    """The factory's entry points, what ``dynamic`` asks for, and how classes are called.

    Args:
        made: for each name that is made by a branch of its own, the word to file it under.
    """
    (factory,) = classes(source, ["StorageBackendFactory"]).values()
    functions = {item.name: item for item in factory.body if isinstance(item, Function)}
    section: Section = {
        name: function_shape(functions[name])
        for name in ("register_backend", "create_backend")
        if name in functions
    }
    dynamic = functions.get("_create_dynamic_backend")
    if dynamic is not None:
        section["dynamic needs"] = _assigned(dynamic, "required_fields")
        section["dynamic makes"] = ", ".join(_constructions(dynamic))
    builtin = functions.get("_create_builtin_backend")
    if builtin is not None:
        section |= _branches(builtin, made)
    return section


def _assigned(function: Function, name: str) -> str:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            return ast.unparse(node.value)
    return "nothing"


def _constructions(node: ast.AST) -> list[str]:
    return [
        ast.unparse(call)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "backend_class"
    ]


def _branches(function: Function, made: Mapping[str, str]) -> Section:
    """How ``if backend_name == ...`` makes each of the named backends."""
    section: Section = {}
    for node in ast.walk(function):
        if isinstance(node, ast.If):
            literals = {
                part.value for part in ast.walk(node.test) if isinstance(part, ast.Constant)
            }
            calls = [form for statement in node.body for form in _constructions(statement)]
            section |= {word: ", ".join(calls) for name, word in made.items() if name in literals}
    return section
