"""Pages of the Python interface: a mkdocstrings directive for each public name."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Page:
    """The content of a module's page.

    Attributes:
        names: Public names, in the page's order; None for the module's ``__all__``.
        elsewhere: Names of ``__all__`` that another page has.
        inherited: Classes that inherit public methods from base classes in this package.
        internal: By class the methods that other packages of the project call, and users do not,
            as regular expressions.
    """

    names: tuple[str, ...] | None = None
    elsewhere: frozenset[str] = frozenset()
    inherited: frozenset[str] = frozenset()
    internal: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


MODULES: Mapping[str, Page] = MappingProxyType(
    {
        "coreml_delegate": Page(
            elsewhere=frozenset({"runtime"}), inherited=frozenset({"CoreMLBackend"})
        ),
        "coreml_delegate.partition": Page(elsewhere=frozenset({"CoreMLPartitioner"})),
        "coreml_delegate.quantizer": Page(elsewhere=frozenset({"CoreMLQuantizer"})),
        "coreml_delegate.quantization": Page(),
        "coreml_delegate.recipes": Page(),
        "coreml_delegate.runtime": Page(
            internal={
                "Model": (
                    *("native_.*", "prepare_.*", "with_outputs"),
                    *("from_files", "check_shapes", "param_dtypes"),
                ),
                "HostProgram": ("delegates", "events"),
                "PythonProgram": ("delegates", "run"),
                "StockProgram": ("delegates", "run"),
                "Execution": ("of", "of_models"),
                "Input": ("of_feature", "of_value"),
            }
        ),
        "coreml_delegate.runtime.devtools": Page(("Inspector",)),
        "coreml_delegate.device_check": Page(),
        "coreml_delegate.runtime.mil.reader": Page(("read_mlpackage",)),
        "coreml_delegate.graph": Page(),
        "coreml_delegate.stablehlo": Page(),
        "coreml_delegate.jax": Page(("compile", "Function", "Session", "export", "save")),
        "coreml_delegate.llm": Page(),
        "coreml_delegate.detection": Page(("nms",)),
        "coreml_delegate.transforms": Page(),
        "coreml_delegate.errors": Page(
            (
                "CoreMLDelegateError",
                "OptionError",
                "LoweringError",
                "UnsupportedOperatorError",
                "ConversionError",
                "ContractError",
                "GraphError",
                "BlobFormatError",
                "ProgramError",
                "InputError",
                "UnsupportedOpError",
                "ExecutionError",
                "EngineUnavailableError",
            )
        ),
    }
)


def names(module: str) -> tuple[str, ...]:
    """Return the public names that the page of a module shows."""
    content = MODULES[module]
    if content.names is not None:
        return content.names
    exported = (name for name in _exported(_tree(module)) if name not in content.elsewhere)
    # Functions, then classes, then constants.
    return tuple(sorted(exported, key=lambda name: (name.isupper(), name[0].isupper())))


def index() -> str:
    """Return the page that lists the modules."""
    return "\n".join(_index()) + "\n"


def page(module: str) -> str:
    """Return the page of a module."""
    return "\n".join(_page(module)) + "\n"


def _index() -> Iterator[str]:
    yield "# Python"
    yield ""
    yield "Names on these pages keep their meaning; every other name is internal."
    yield ""
    yield "| module | |"
    yield "|---|---|"
    for module in MODULES:
        yield f"| [`{module}`]({module}.md) | {_summary(module)} |"


def _page(module: str) -> Iterator[str]:
    content = MODULES[module]
    yield f"# `{module}`"
    yield ""
    yield (ast.get_docstring(_tree(module)) or "").strip()
    for name in names(module):
        hidden = ["!^_", *(f"!^{method}$" for method in content.internal.get(name, ()))]
        yield ""
        yield f"::: {module}.{name}"
        yield "    options:"
        yield f"      filters: {hidden}"
        yield f"      inherited_members: {str(name in content.inherited).lower()}"


def _summary(module: str) -> str:
    paragraph = (ast.get_docstring(_tree(module)) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def _tree(module: str) -> ast.Module:
    path = _ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text("utf-8"))


def _exported(tree: ast.Module) -> list[str]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return ast.literal_eval(value)
    raise ValueError("the module has no __all__")
