"""Checks who may import whom. Exits with the list of what is wrong.

layout <- buckets <- reducer <- ddp        an arrow points at the importer; nothing reaches back, not even through other modules
comm.base <- comm.*                        transports know nothing of buckets and reducers
ops -> kernels, native                     and neither the transports nor the reducer
torch.distributed                          only within ddpcomm/comm/
os.environ                                 only in ddpcomm/env.py
kernels/, csrc/                            nothing of ddpcomm; csrc/ nothing of torch
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.sources import ROOT, files

CHAIN = ("ddpcomm.layout", "ddpcomm.buckets", "ddpcomm.reducer", "ddpcomm.ddp")
MUST_NOT_REACH = {
    "ddpcomm.layout": (*CHAIN[1:], "ddpcomm.comm", "ddpcomm.ops"),
    "ddpcomm.buckets": CHAIN[2:],
    "ddpcomm.reducer": CHAIN[3:],
    "ddpcomm.ops": (*CHAIN, "ddpcomm.comm"),
    "ddpcomm.comm": CHAIN,
    "ddpcomm.errors": ("ddpcomm", "torch"),
}
DISTRIBUTED = (
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch.nn.parallel.DistributedDataParallel",
    "torch._C._distributed_c10d",
    "torch._C._distributed_autograd",
)
ELSEWHERE = ("ddpcomm._native", "ddpcomm.kernels")  # parts of the package whose source is not below ddpcomm/
ENVIRONMENT = ("os.environ", "os.getenv", "os.putenv")
INCLUDE_OF_TORCH = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10|caffe2)/')


@dataclass
class Module:
    """A Python file: the line at which it first imports each module, and at which it first names each dotted attribute."""

    name: str
    path: Path
    imports: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, int] = field(default_factory=dict)

    def uses(self, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        """Imports and attributes that are one of `names` or below it."""
        for used, line in {**self.attributes, **self.imports}.items():
            if any(within(used, name) for name in names):
                yield used, line


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def read_module(path: Path, name: str) -> Module:
    module = Module(name, path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    full_names = {}
    for node in nodes:
        if not isinstance(node, ast.stmt | ast.expr):
            continue  # has no line
        for local, used in imported(node, package).items():
            module.imports.setdefault(used, node.lineno)
            full_names[local] = used
    for node in nodes:
        if isinstance(node, ast.Attribute) and (dotted := dotted_name(node)):
            first, _, rest = dotted.partition(".")
            module.attributes.setdefault(f"{full_names.get(first, first)}.{rest}", node.lineno)
    return module


def imported(node: ast.AST, package: str) -> dict[str, str]:
    """What a statement, or a call of `import_module`, brings in: full names by local ones. `package` is where relative ones start."""
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name: alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*parents, *([node.module] if node.module else [])])
        return {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}
    if isinstance(node, ast.Call) and (dotted_name(node.func) or "").rpartition(".")[2] in ("import_module", "__import__"):
        return {str(argument.value): str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)}
    return {}


def dotted_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (prefix := dotted_name(node.value)):
        return f"{prefix}.{node.attr}"
    return None


def read_package(root: Path, directory: str, package: str) -> dict[str, Module]:
    modules = {}
    for path in files(root / directory, ".py"):
        parts = path.relative_to(root / directory).with_suffix("").parts
        name = ".".join([package, *(part for part in parts if part != "__init__")])
        modules[name] = read_module(path, name)
    return modules


def graph(modules: dict[str, Module]) -> dict[str, set[str]]:
    """For each module what it imports: its fellow modules, and everything from outside by its full name.

    `from ddpcomm.comm import base` is an import of ddpcomm.comm.base; `from ddpcomm.comm.base import Work` too.
    """
    return {name: {resolve(used, modules) for used in module.imports} - {name} for name, module in modules.items()}


def resolve(used: str, modules: dict[str, Module]) -> str:
    if any(within(used, part) for part in ELSEWHERE):
        return used
    name = used
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or used


def path_between(imports: dict[str, set[str]], start: str, targets: tuple[str, ...]) -> list[str] | None:
    """The shortest chain of imports from `start` to one of `targets` or below it."""
    paths = [[start]]
    seen = {start}
    for path in paths:
        for used in sorted(imports.get(path[-1], ())):
            if used not in seen and any(within(used, target) for target in targets):
                return [*path, used]
            if used not in seen:
                seen.add(used)
                paths.append([*path, used])
    return None


def problems(root: Path) -> Iterator[str]:
    product = read_package(root, "ddpcomm", "ddpcomm")
    kernels = read_package(root, "kernels", "ddpcomm.kernels")
    imports = graph(product)
    for start, targets in MUST_NOT_REACH.items():
        for name in sorted(name for name in product if within(name, start)):
            if path := path_between(imports, name, targets):
                yield f"{name} must not reach {path[-1]}, and does: {' -> '.join(path)}"
    for used, line in product["ddpcomm.layout"].uses(("torch",)) if "ddpcomm.layout" in product else ():
        yield f"ddpcomm/layout.py:{line}: uses {used}; planning works on integers only"
    for module in [*product.values(), *kernels.values()]:
        place = module.path.relative_to(root)
        if not within(module.name, "ddpcomm.comm"):
            for used, line in module.uses(DISTRIBUTED):
                yield f"{place}:{line}: uses {used}; only ddpcomm/comm/ may"
        if module.name != "ddpcomm.env":
            for used, line in module.uses(ENVIRONMENT):
                yield f"{place}:{line}: uses {used}; environment variables are read in ddpcomm/env.py"
    for module in kernels.values():
        for used, line in module.imports.items():
            if within(used, "ddpcomm") and not within(used, "ddpcomm.kernels"):
                yield f"{module.path.relative_to(root)}:{line}: imports {used}; kernels import nothing of ddpcomm"
    for source in files(root / "csrc", ".h", ".cpp", ".cu", ".cuh", ".inc"):
        for number, text in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
            if INCLUDE_OF_TORCH.match(text):
                yield f"{source.relative_to(root)}:{number}: includes torch; csrc takes pointers, sizes and streams"


if __name__ == "__main__":
    sys.exit("\n".join(problems(ROOT)) or None)
