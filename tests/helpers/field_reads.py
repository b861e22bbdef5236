"""Which fields of which classes the package reads, found by following types through its source.

A read is an attribute of a value that is known to be of the class: by the annotation of a
parameter, a field or a return value, or by assignment from such a value. An attribute of the same
name of anything else is no read. A container counts as what it holds.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.import_graph import file_of, module_of

Class = tuple[Path, str]
Types = frozenset[Class]
Scope = dict[str, Types]
NOTHING: Types = frozenset()
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Package:
    """Every class and function of the package's files, by file and name."""

    def __init__(self, root: Path, trees: Mapping[Path, ast.Module]) -> None:
        self.root, self.trees = root, trees
        self.defined: dict[Class, ast.AST] = {}
        self.imported: dict[tuple[Path, str], tuple[Path, str]] = {}
        for path, tree in trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    self.defined[path, node.name] = node
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.level:
                    self._import(path, node)
            for name, meant in aliases(tree):
                self.imported[path, name] = (path, meant)
        self._fields: dict[tuple[Class, str], Types] = {}
        self._nodes: dict[int, tuple[list[ast.AST], list[ast.AST]]] = {}
        self._sets: dict[ast.AST, set[str]] = {}
        self.reads: set[tuple[str, str]] = set()
        """(class, field) of every read."""

    def _import(self, path: Path, node: ast.ImportFrom) -> None:
        parts = module_of(self.root, path, node)
        for alias in node.names if parts is not None else ():
            module = file_of(self.root, (*parts, alias.name))
            file = file_of(self.root, parts)
            name = alias.asname or alias.name
            if module is not None:
                self.imported[path, name] = (module, "")
            elif file is not None:
                self.imported[path, name] = (file, alias.name)

    def resolve(self, path: Path, name: str) -> Class | None:
        """Where the class or function that a file calls `name` is defined; (file, "") for a module."""
        at: Class | None = (path, name)
        while at is not None and at not in self.defined:
            at = self.imported.get(at)
            if at is not None and not at[1]:
                return at
        return at

    def resolved(self, path: Path, node: ast.expr) -> Class | None:
        """As `resolve`, for a name or a module's attribute."""
        if isinstance(node, ast.Name):
            return self.resolve(path, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = self.resolve(path, node.value.id)
            if module is not None and not module[1]:
                return self.resolve(module[0], node.attr)
        return None

    # ---- what an annotation and a field say --------------------------------------------------

    def annotated(self, path: Path, node: ast.expr | None, own: Types = NOTHING) -> Types:
        """The package's classes in an annotation, whatever holds them."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.Name) and node.id == "Self":
            return own
        if isinstance(node, ast.BinOp):
            return self.annotated(path, node.left, own) | self.annotated(path, node.right, own)
        if isinstance(node, ast.Subscript):
            if ast.unparse(node.value) in {"Callable", "type", "Literal"}:
                return NOTHING
            return self.annotated(path, node.value, own) | self.annotated(path, node.slice, own)
        if isinstance(node, ast.Tuple):
            return NOTHING.union(*(self.annotated(path, each, own) for each in node.elts))
        if node is None:
            return NOTHING
        owner = self.resolved(path, node)
        return (
            frozenset({owner}) if owner is not None and isinstance(self.defined.get(owner), ast.ClassDef) else NOTHING
        )

    def field(self, owner: Class, name: str) -> Types:
        """The type of a field, a property or an attribute that a method of the class sets."""
        key = (owner, name)
        if key not in self._fields:
            self._fields[key] = NOTHING  # where a class leads back to itself
            self._fields[key] = self._field(owner, name)
        return self._fields[key]

    def _field(self, owner: Class, name: str) -> Types:
        path, node = owner[0], self.defined[owner]
        assert isinstance(node, ast.ClassDef)
        types = NOTHING
        # some fields are declared where only types are checked
        guarded = [inner for each in node.body if isinstance(each, ast.If) for inner in each.body]
        for each in [*node.body, *guarded]:
            if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == name:
                types |= self.annotated(path, each.annotation)
            if isinstance(each, FUNCTIONS):
                if each.name == name:  # a property
                    types |= self.annotated(path, each.returns, frozenset({owner}))
                if name in self.sets(each):
                    types |= Reader(self, path, frozenset({owner})).assigned(each, name)
        for base in self.bases(owner):
            types |= self.field(base, name)
        return types

    def sets(self, method: ast.AST) -> set[str]:
        """Names of the attributes that a method sets on itself."""
        if method not in self._sets:
            nodes = (node for node in ast.walk(method) if isinstance(node, ast.Attribute))
            self._sets[method] = {node.attr for node in nodes if isinstance(node.ctx, ast.Store) and is_own(node)}
        return self._sets[method]

    def nodes(self, body: list[Any]) -> list[ast.AST]:
        """The nodes of statements in their order, bodies of functions and classes left out."""
        if id(body) not in self._nodes:
            self._nodes[id(body)] = (body, nodes_of(body))  # with the body, lest another get its id
        return self._nodes[id(body)][1]

    def bases(self, owner: Class) -> list[Class]:
        node = self.defined[owner]
        assert isinstance(node, ast.ClassDef)
        bases = (self.resolved(owner[0], base) for base in node.bases)
        return [base for base in bases if base is not None and isinstance(self.defined.get(base), ast.ClassDef)]

    def read(self, owner: Class, name: str) -> None:
        """Note a read of the class and of those that it inherits from."""
        self.reads.add((owner[1], name))
        for base in self.bases(owner):
            self.read(base, name)

    # ---- the walk ----------------------------------------------------------------------------

    def note_reads(self, path: Path) -> None:
        """Note every read in a file."""
        Reader(self, path, NOTHING).block(self.trees[path].body, {})


class Reader:
    """One file, or one class's methods, walked with the types of its names."""

    def __init__(self, package: Package, path: Path, own: Types) -> None:
        self.package, self.path, self.own = package, path, own

    def block(self, body: list[Any], scope: Scope) -> None:
        """Note the reads of statements, functions and classes among them."""
        for _ in range(2):  # a name may be used above the line that gives its type
            for node in self.package.nodes(body):
                self.bind(node, scope)
        for node in self.package.nodes(body):
            if isinstance(node, ast.ClassDef):
                inside = Reader(self.package, self.path, frozenset({(self.path, node.name)}))
                inside.own &= frozenset(self.package.defined)
                inside.block(node.body, dict(scope))
            elif isinstance(node, (*FUNCTIONS, ast.Lambda)):
                self.block(
                    node.body if isinstance(node.body, list) else [node.body], scope | self.parameters(node.args)
                )
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                for owner in self.types(node.value, scope):
                    self.package.read(owner, node.attr)

    def parameters(self, arguments: ast.arguments) -> Scope:
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
        scope = {each.arg: self.package.annotated(self.path, each.annotation, self.own) for each in every}
        if every and every[0].arg in {"self", "cls"}:
            scope[every[0].arg] = self.own
        return scope

    def assigned(self, function: ast.FunctionDef | ast.AsyncFunctionDef, target: str) -> Types:
        """The types of what a method assigns to its own attribute `target`."""
        scope = self.parameters(function.args)
        nodes = self.package.nodes(function.body)
        for node in nodes:
            self.bind(node, scope)
        types = NOTHING
        for node in nodes:
            if isinstance(node, ast.AnnAssign) and is_own(node.target, target):
                types |= self.package.annotated(self.path, node.annotation, self.own)
            if isinstance(node, ast.Assign):
                for place, value in pairs(node):
                    if is_own(place, target):
                        types |= self.types(value, scope)
        return types

    def bind(self, node: ast.AST, scope: Scope) -> None:
        """Names that a statement or a comprehension gives a value."""
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            scope[node.target.id] = self.package.annotated(self.path, node.annotation, self.own)
        elif isinstance(node, ast.Assign):
            for place, value in pairs(node):
                self.name(place, self.types(value, scope), scope)
        elif isinstance(node, ast.NamedExpr):
            self.name(node.target, self.types(node.value, scope), scope)
        elif isinstance(node, ast.For | ast.comprehension):
            self.name(node.target, self.types(node.iter, scope), scope)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self.name(node.optional_vars, self.types(node.context_expr, scope), scope)

    def name(self, place: ast.expr, types: Types, scope: Scope) -> None:
        for node in ast.walk(place):
            if isinstance(node, ast.Name):
                scope[node.id] = scope.get(node.id, NOTHING) | types

    def types(self, node: ast.expr, scope: Scope) -> Types:
        """The package's classes that an expression's value may be of."""
        if isinstance(node, ast.Name):
            return scope.get(node.id, NOTHING)
        if isinstance(node, ast.Attribute):
            owners = self.types(node.value, scope)
            return NOTHING.union(*(self.package.field(owner, node.attr) for owner in owners))
        if isinstance(node, ast.Subscript):
            owners = self.types(node.value, scope)
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):  # a TypedDict's key
                return NOTHING.union(*(self.package.field(owner, node.slice.value) for owner in owners))
            return owners
        if isinstance(node, ast.Call):
            return self.called(node, scope)
        if isinstance(node, ast.IfExp):
            return self.types(node.body, scope) | self.types(node.orelse, scope)
        if isinstance(node, ast.BoolOp | ast.Tuple | ast.List):
            values = node.values if isinstance(node, ast.BoolOp) else node.elts
            return NOTHING.union(*(self.types(each, scope) for each in values))
        return NOTHING

    def called(self, node: ast.Call, scope: Scope) -> Types:
        """What a call gives: an instance of the class, or what the function's annotation says."""
        owner = self.package.resolved(self.path, node.func)
        definition = None if owner is None else self.package.defined.get(owner)
        if isinstance(definition, ast.ClassDef):
            return frozenset({owner})
        if isinstance(definition, FUNCTIONS):
            return self.package.annotated(owner[0], definition.returns)
        if isinstance(node.func, ast.Attribute):
            if node.func.attr in {"model_copy", "values"}:
                return self.types(node.func.value, scope)
            maker = self.package.resolved(self.path, node.func.value)
            is_class = maker is not None and isinstance(self.package.defined.get(maker), ast.ClassDef)
            owners = frozenset({maker}) if is_class else self.types(node.func.value, scope)
            return NOTHING.union(*(self.package.field(each, node.func.attr) for each in owners))
        if isinstance(node.func, ast.Name) and node.func.id in {
            "replace",
            "enumerate",
            "zip",
            "sorted",
            "list",
            "reversed",
        }:
            return NOTHING.union(*(self.types(each, scope) for each in node.args))
        return NOTHING


def aliases(tree: ast.Module) -> list[tuple[str, str]]:
    """Names that stand for another one under `if TYPE_CHECKING`, and which: a class that is made at run time."""
    guarded = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    given = [each for node in guarded for each in node.body if isinstance(each, ast.Assign)]
    return [(ast.unparse(each.targets[0]), each.value.id) for each in given if isinstance(each.value, ast.Name)]


def is_own(node: ast.expr, name: str | None = None) -> bool:
    """Whether an expression is `self.NAME`, or any attribute of `self`."""
    of_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return of_self and name in {None, node.attr}


def nodes_of(body: list[Any]) -> list[ast.AST]:
    """The nodes of statements in their order, bodies of functions and classes left out."""
    nodes: list[ast.AST] = []
    waiting: list[ast.AST] = body[::-1]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        if isinstance(node, FUNCTIONS):
            waiting += [*node.args.defaults, *node.decorator_list]
        elif not isinstance(node, ast.ClassDef | ast.Lambda):
            waiting += [*ast.iter_child_nodes(node)][::-1]
    return nodes


def pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """Target and value of an assignment, tuples taken apart where both sides have as many."""
    taken: list[tuple[ast.expr, ast.expr]] = []
    for target in node.targets:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(node.value, ast.Tuple)
            and len(target.elts) == len(node.value.elts)
        ):
            taken += zip(target.elts, node.value.elts)
        else:
            taken.append((target, node.value))
    return taken


def reads_of(root: Path, trees: Mapping[Path, ast.Module], files: list[Path]) -> set[tuple[str, str]]:
    """(class, field) of every read in `files`."""
    package = Package(root, trees)
    for path in files:
        package.note_reads(path)
    return package.reads
