"""Reads StableHLO of any form into a module of jaxlib's MLIR.

MLIR's parser is recursive: too deeply nested text would end the process, so the depth is checked
before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coreml_delegate.errors import CoreMLDelegateError, LoweringError, UnsupportedOperatorError
from coreml_delegate.patches.jax import jax_module, mlir_context

Mlir = Any
"""A value of jaxlib's MLIR bindings, which have no types."""

_BYTECODE = b"ML\xefR"
# Start of the producer's name in a portable artifact.
_PORTABLE = b"StableHLO_v"
_DEEPEST_TEXT = 500
_DEEPEST_REGIONS = 100
_SUFFIX_OF_EXPORTS = ".jax"
QUANTIZED = "quantized element types have no counterpart in a Core ML program"
"""Reason to refuse tensors of quantized types."""

# jaxlib does not have MLIR's dialect of quantized types.
_QUANTIZED_TYPE = re.compile(r"!quant\.[^>]*>")
_DECOMPOSE = "builtin.module(func.func(chlo-legalize-to-stablehlo))"

# Strings and comments are skipped; the > of an arrow is not a bracket.
_TOKEN = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|->|^[ \t]*[#!][\w$.]+[ \t]*=|[#!][\w$.]+|[(\[{<>}\])]'
    r"|-{50,}|affine_(?:map|set)\b",
    re.MULTILINE,
)
_OPEN, _CLOSE = "([{<", ")]}>"


def mlir_module(source: Any) -> Mlir:
    """Return the MLIR module of a program.

    Args:
        source: MLIR text; MLIR bytecode, a portable artifact or a serialized ``jax.export`` as
            bytes; the path of a file with any of these; a ``jax.export.Exported``, a
            ``jax.stages.Lowered``, or a module.

    Raises:
        LoweringError: jaxlib is not installed, or ``source`` is none of these.
        OSError: The file cannot be read.
    """
    ir = mlir_ir()
    if isinstance(source, ir.Module):
        return _check_regions(source)
    if hasattr(source, "mlir_module_serialized"):
        return _of_bytes(source.mlir_module_serialized)
    if hasattr(source, "compiler_ir"):
        return _check_regions(source.compiler_ir(dialect="stablehlo"))
    if isinstance(source, Path) or (isinstance(source, str) and _is_path(source)):
        path = Path(source)
        content = path.read_bytes()
        return _of_export(content) if path.suffix == _SUFFIX_OF_EXPORTS else _of_bytes(content)
    if isinstance(source, str):
        return _of_text(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return _of_bytes(bytes(source))
    raise LoweringError(
        "not a StableHLO program",
        got=type(source).__name__,
        expected="MLIR text, bytes, a path, a jax.export.Exported or a jax.stages.Lowered",
    )


def mlir_ir() -> Any:
    """Return jaxlib's module ``ir``.

    Raises:
        LoweringError: It is not installed.
    """
    return jax_module("jax.extend.mlir.ir")


def dialect(name: str) -> Any:
    """Return the Python module of a dialect, as ``stablehlo``."""
    return jax_module(f"jax.extend.mlir.dialects.{name}")


def _is_path(source: str) -> bool:
    """Whether text is a path: too short for a program, without newlines, braces or quotes."""
    return 0 < len(source) < 4096 and not re.search(r"[\n\r\0{}<>\"]", source)


def _of_bytes(content: bytes) -> Mlir:
    if content.startswith(_BYTECODE):
        return _of_bytecode(content)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return _of_export(content)
    if "\0" in text:
        return _of_export(content)
    return _of_text(text)


def _of_export(content: bytes) -> Mlir:
    export = jax_module("jax.export")
    try:
        exported = export.deserialize(bytearray(content))
    except Exception as error:
        raise LoweringError(
            "neither MLIR nor a serialized jax.export", got=_first_line(error)
        ) from error
    return _of_bytes(exported.mlir_module_serialized)


def _of_bytecode(content: bytes) -> Mlir:
    context = _context()
    is_portable = _PORTABLE in content[:64]
    try:
        if is_portable:
            read = jax_module("jax.extend.mlir").deserialize_portable_artifact
            return _check_regions(read(content, context))
        return _check_regions(mlir_ir().Module.parse(content, context))
    except CoreMLDelegateError:
        raise
    except Exception as error:
        if b"quant" in content:
            raise _quantized_error() from error
        kind = "portable artifact" if is_portable else "MLIR bytecode"
        raise LoweringError(f"malformed {kind}", got=_first_line(error)) from error


def _of_text(text: str) -> Mlir:
    check_nesting(text)
    try:
        module = mlir_ir().Module.parse(text, _context())
    except Exception as error:
        quantized = _QUANTIZED_TYPE.search(text)
        if quantized is not None:
            line = text.count("\n", 0, quantized.start()) + 1
            raise _quantized_error(quantized.group(), f" (at line {line})") from error
        line = _first_line(error)
        is_foreign = "unregistered dialect" in line or "Dialect `" in line
        what = (
            "the text uses a dialect that StableHLO lacks" if is_foreign else "malformed MLIR text"
        )
        raise LoweringError(what, got=line) from error
    return _check_regions(module)


def _quantized_error(type: str | None = None, where: str = "") -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"{QUANTIZED}{where}", got=type, remedy="Export the model in floating point"
    )


def decompose(op: Mlir) -> Mlir | None:
    """Decompose an operation of CHLO to a module with a function of StableHLO operations.

    Returns:
        The module, or None if MLIR does not decompose the operation.
    """
    operand_types, result_types = (
        [str(value.type) for value in values] for values in (op.operands, op.results)
    )
    names = [f"%a{n}" for n in range(len(operand_types))]
    attributes = ", ".join(f"{a} = {op.attributes[a]}" for a in op.attributes)
    results = f"%r:{len(result_types)}" if len(result_types) > 1 else "%r"
    returned = ", ".join(
        f"%r#{n}" if len(result_types) > 1 else "%r" for n in range(len(result_types))
    )
    arguments = ", ".join(
        f"{name}: {type}" for name, type in zip(names, operand_types, strict=True)
    )
    text = f"""
    func.func @main({arguments}) -> ({", ".join(result_types)}) {{
      {results} = "{op.name}"({", ".join(names)}) {{{attributes}}}
        : ({", ".join(operand_types)}) -> ({", ".join(result_types)})
      return {returned} : {", ".join(result_types)}
    }}"""
    context = _context()
    try:
        module = mlir_ir().Module.parse(text, context)
        # Registers the pass; repeated calls have no effect.
        dialect("stablehlo").register_stablehlo_passes()
        with context:
            manager = jax_module("jax.extend.mlir.passmanager").PassManager
            manager.parse(_DECOMPOSE).run(module.operation)
    except CoreMLDelegateError:
        raise
    except Exception:  # noqa: BLE001 - MLIR raises several classes for an unknown operation
        return None
    (function,) = module.body.operations
    operations = function.operation.regions[0].blocks[0].operations
    return None if any(v.operation.name == op.name for v in operations) else module


def _context() -> Any:
    # A new context for each program: a context keeps every constant that it has read.
    return mlir_context()


def check_nesting(text: str) -> None:
    """Refuse text whose brackets, or references between aliases, are nested too deeply for MLIR.

    Raises:
        LoweringError: Nested too deeply; or an affine map, which StableHLO does not have.
    """
    depth = 0
    aliases: dict[str, int] = {}
    defined, deepest = "", 0
    for token in _tokens(text):
        if token in _OPEN:
            depth += 1
        elif token in _CLOSE:
            depth = max(0, depth - 1)
        elif token.startswith(("affine", "-")):
            raise LoweringError("not StableHLO", got=token[:10])
        elif token.endswith("="):
            aliases[defined] = deepest
            defined, deepest = token[:-1].strip(), 0
            depth = 0
        token_depth = depth + aliases.get(token, 0)
        deepest = max(deepest, token_depth)
        if token_depth > _DEEPEST_TEXT:
            raise LoweringError(
                "the text is nested too deeply", expected=f"{_DEEPEST_TEXT} brackets at most"
            )


def _tokens(text: str) -> Iterator[str]:
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token != "->" and token[0] not in '"/':
            yield token


def _check_regions(module: Mlir) -> Mlir:
    """Return the module, or raise an error if its regions are nested too deeply."""
    pending = [(module.operation, 0)]
    while pending:
        operation, depth = pending.pop()
        if depth > _DEEPEST_REGIONS:
            raise LoweringError(
                "regions are nested too deeply", expected=f"{_DEEPEST_REGIONS} at most"
            )
        pending.extend(
            (inner.operation, depth + 1)
            for region in operation.regions
            for block in region.blocks
            for inner in block.operations
        )
    return module


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    messages = [line for line in lines if not line.endswith("assembly:")]
    text = (messages or lines or [type(error).__name__])[0]
    return text if len(text) <= 300 else f"{text[:300]}..."
