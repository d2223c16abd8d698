"""No module imports itself by way of others, not in functions nor for type checkers either."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# import-linter holds the layers of packages, but overlooks circles inside of a layer.
FOLDERS = {
    "coreml_delegate": ROOT / "coreml_delegate",
    **{f"coreml_delegate.{n}": ROOT / n for n in ("partition", "quantizer", "runtime", "scripts")},
}


def _modules() -> dict[str, Path]:
    modules = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            inside = path.relative_to(folder).with_suffix("").parts
            if f"{package}.{inside[0]}" in FOLDERS:
                continue
            name = ".".join((package, *inside))
            modules[name.removesuffix(".__init__")] = path
    return modules


def _imports(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _check(code_by_module: dict[str, str]) -> None:
    """Raise ``CycleError`` with the modules of a circle, if there is one."""
    edges: dict[str, set[str]] = {}
    for module, code in code_by_module.items():
        # An imported name is a module, or an object of the module before its last dot.
        targets = {n if n in code_by_module else n.rpartition(".")[0] for n in _imports(code)}
        edges[module] = targets & code_by_module.keys()
    TopologicalSorter(edges).prepare()


def test_imports_have_no_circle() -> None:
    modules = {name: path.read_text() for name, path in _modules().items()}
    assert len(modules) > 400
    _check(modules)


def test_imports_inside_functions_and_for_type_checkers_count() -> None:
    inside = "def f():\n    from package.one import x\n"
    for_types = "if TYPE_CHECKING:\n    from package import two\n"
    with pytest.raises(CycleError):
        _check({"package": "", "package.one": for_types, "package.two": inside})
    _check({"package": "", "package.one": for_types, "package.two": "import package"})
