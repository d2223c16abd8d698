"""Programs of every form are read; what is none is refused, and never ends the process."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.extend.mlir
import jax.numpy as jnp
import numpy as np
import pytest

from coreml_delegate import stablehlo
from coreml_delegate.errors import LoweringError
from coreml_delegate.stablehlo import reader
from coreml_delegate.stablehlo.parse import check_nesting, mlir_module

_TEXT = """
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.add %x, %x : tensor<2xf32>
  return %0 : tensor<2xf32>
}
"""
_X = np.array([1, 2], np.float32)


def _bytecode() -> bytes:
    buffer = io.BytesIO()
    mlir_module(_TEXT).operation.write_bytecode(buffer)
    return buffer.getvalue()


def _exported() -> Any:
    return jax.export.export(jax.jit(lambda x: x + x))(jax.ShapeDtypeStruct((2,), jnp.float32))


def _sources(folder: Path) -> list[Any]:
    module = str(mlir_module(_TEXT))
    portable = jax.extend.mlir.serialize_portable_artifact(module, "1.0.0")
    (folder / "program.mlir").write_text(_TEXT)
    (folder / "program.mlirbc").write_bytes(_bytecode())
    (folder / "program.jax").write_bytes(_exported().serialize())
    return [
        _TEXT,
        _TEXT.encode(),
        _bytecode(),
        portable,
        bytes(_exported().serialize()),
        _exported(),
        jax.jit(lambda x: x + x).lower(_X),
        mlir_module(_TEXT),
        folder / "program.mlir",
        str(folder / "program.mlirbc"),
        folder / "program.jax",
    ]


def test_every_form_is_read(tmp_path: Path) -> None:
    sources = _sources(tmp_path)
    for source in sources:
        assert mlir_module(source).operation.name == "builtin.module"
    # The forms differ in what is parsed, not in what is compiled.
    for source in (sources[3], sources[10]):
        assert stablehlo.compile(source, "reference").run(_X)[0].tolist() == [2, 4]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("module {", "malformed MLIR text"),
        ("func.func @main() { foo.bar return }", "Dialect `foo' not found"),
        (_TEXT.replace("%0 = ", "%1 = "), "malformed MLIR text"),
        (b"ML\xefR", "malformed MLIR bytecode"),
        (b"ML\xefRStableHLO_v1.0.0\0", "malformed portable artifact"),
        (b"\xff\xfe\0\0", "neither MLIR nor a serialized jax.export"),
        (_bytecode()[:100], "malformed MLIR bytecode"),
        (3, "not a StableHLO program"),
        ("", "has no functions"),
        ("func.func @f() { return }\nfunc.func @g() { return }", "no function main"),
    ],
)
def test_what_is_no_program_is_refused(source: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        stablehlo.compile(source, "reference")


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        stablehlo.compile(tmp_path / "none.mlir")


def _nested(kind: str, depth: int) -> str:
    if kind == "regions":
        opened = '"stablehlo.if"(%p) ({' * depth
        closed = "}, {stablehlo.return}) : (tensor<i1>) -> () stablehlo.return " * depth
        return f"func.func @main(%p: tensor<i1>) {{ {opened} stablehlo.return {closed} return }}"
    if kind == "types":
        return f"func.func private @f({'tuple<' * depth}i1{'>' * depth})"
    if kind == "aliases":
        lines = [f"#a{n} = [#a{n - 1}]" for n in range(1, depth)]
        return "\n".join(
            ["#a0 = [1 : i64]", *lines, f"module attributes {{x.a = #a{depth - 1}}} {{}}"]
        )
    return f"module attributes {{x.a = {'[' * depth}{']' * depth}}} {{}}"


@pytest.mark.parametrize("kind", ["regions", "types", "aliases", "attributes"])
def test_deep_nesting_is_refused_before_mlir_sees_it(kind: str) -> None:
    with pytest.raises(LoweringError, match="nested too deeply"):
        mlir_module(_nested(kind, 1_000_000))


def test_brackets_in_strings_and_comments_are_none() -> None:
    check_nesting(f'module attributes {{x.a = "{"(" * 1000}"}} {{}} // {"[" * 1000}')
    check_nesting("func.func private @f(i1) -> i1\n" * 1000)


def test_affine_maps_are_refused() -> None:
    with pytest.raises(LoweringError, match="not StableHLO: got affine_map"):
        mlir_module(f"#map = affine_map<(d0) -> ({'-' * 100000}d0)>\nmodule {{}}")


def test_functions_that_call_themselves_are_refused() -> None:
    text = """
    func.func @main(%x: tensor<f32>) -> tensor<f32> {
      %0 = call @f(%x) : (tensor<f32>) -> tensor<f32>
      return %0 : tensor<f32>
    }
    func.func @f(%x: tensor<f32>) -> tensor<f32> {
      %0 = call @main(%x) : (tensor<f32>) -> tensor<f32>
      return %0 : tensor<f32>
    }
    """
    with pytest.raises(LoweringError, match="a function calls itself: got main > f > main"):
        stablehlo.compile(text)


def _chain(count: int, calls: int) -> str:
    call = "\n".join(f"%{n} = call @f{{}}(%x) : (tensor<f32>) -> tensor<f32>" for n in range(calls))
    inner = "func.func @{}(%x: tensor<f32>) -> tensor<f32> {{ {}\n return %0 : tensor<f32> }}\n"
    text = "".join(
        inner.format(f"f{n}" if n else "main", call.format(*[n + 1] * calls)) for n in range(count)
    )
    last = "func.func @f{}(%x: tensor<f32>) -> tensor<f32> {{ return %x : tensor<f32> }}"
    return text + last.format(count)


def test_calls_are_not_inlined_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MOST_OPERATIONS", 1000)
    with pytest.raises(LoweringError, match="calls are nested too deeply"):
        stablehlo.compile(_chain(1000, 1))
    with pytest.raises(LoweringError, match="too large when its functions are inlined"):
        stablehlo.compile(_chain(40, 2))


@pytest.mark.slow
def test_the_extra_is_named_where_jax_is_missing() -> None:
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from coreml_delegate import stablehlo, jax\n"
        "for call in (lambda: stablehlo.compile('module {}'), lambda: jax.compile(abs, 1)):\n"
        "    try: call()\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.count("LoweringError") == 2
    assert run.stdout.count("pip install 'coreml-delegate[jax]'") == 2
