"""StableHLO files on the command line: compiled for an engine, or run by XLA as the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from coreml_delegate import runtime
from coreml_delegate.errors import OptionError
from coreml_delegate.exported.source_model import SourceModel
from coreml_delegate.patches.jax import xla_client
from coreml_delegate.patches.third_party import wrap_errors
from coreml_delegate.runtime.loading import Execution, Input, LoadedProgram, Output
from coreml_delegate.scripts.inputs.input_files import random_inputs
from coreml_delegate.scripts.inputs.random_tensors import generator

if TYPE_CHECKING:
    from coreml_delegate.graph import Dimension, TensorType
    from coreml_delegate.stablehlo import Program

SUFFIXES = (".mlir", ".stablehlo", ".jax")
"""MLIR text or bytecode, portable artifacts, and serialized ``jax.export``."""
_EXPORT = ".jax"


def is_stablehlo(path: Path | str) -> bool:
    """Whether a path is taken for a StableHLO file."""
    return Path(path).suffix in SUFFIXES


def compile_file(
    path: Path, engine: str | None = runtime.AUTO, options: runtime.EngineOptions | None = None
) -> Program:
    """Compile a StableHLO file.

    Args:
        path: One of ``SUFFIXES``.
        engine: Name of an engine; None for the fastest that computes in the program's own types.
        options: Engine options.

    Raises:
        OptionError: No such file.
        CoreMLDelegateError: See ``stablehlo.compile``.
    """
    from coreml_delegate import stablehlo

    if not path.is_file():
        raise OptionError("no such file", got=str(path))
    program = stablehlo.compile(path, engine=engine or runtime.AUTO, options=options)
    types = [*program.parameters.values(), *program.outputs.values()]
    if engine is None and any(type.dtype.numpy == np.float16 for type in types):
        return program.on("reference", options)
    return program


class LoadedStableHLO(LoadedProgram):
    """A StableHLO program."""

    def __init__(self, program: Program, options: runtime.EngineOptions) -> None:
        self._program = program
        self.inputs = tuple(
            input_of(name, type, program.executable.dimensions)
            for name, type in program.parameters.items()
        )
        self.execution = Execution.of_models([program.executable.model], options)

    def run(self, inputs: Sequence[Any]) -> dict[str, Output]:
        """Run once; see ``LoadedProgram``."""
        results = self._program.run(*(tensor.numpy() for tensor in inputs))
        return {
            name: torch.from_numpy(np.array(array))
            for name, array in zip(self._program.outputs, results, strict=True)
        }


def input_of(name: str, type: TensorType, dimensions: Mapping[str, Dimension]) -> Input:
    """Return an input of a program; its symbolic sizes are the smallest by default."""
    least: Any = {dimension.symbol: dimension.least for dimension in dimensions.values()}
    sizes = (size if isinstance(size, int) else int(size.subs(least)) for size in type.shape)
    return Input(name, torch_dtype(type), tuple(sizes))


def torch_dtype(type: TensorType) -> torch.dtype:
    """Return torch's dtype for an element type."""
    return torch.from_numpy(np.empty(0, type.dtype.numpy)).dtype


def load_xla_model(path: Path, *, seed: int) -> SourceModel:
    """Return a StableHLO program as a model that XLA runs, with random example inputs.

    Raises:
        OptionError: No such file, or XLA cannot compile it.
        CoreMLDelegateError: See ``stablehlo.compile``, which says what the inputs are.
    """
    program = compile_file(path, "reference")
    inputs = LoadedStableHLO(program, runtime.EngineOptions()).inputs
    args = tuple(random_inputs(inputs, generator(seed)))
    run = _run_export if path.suffix == _EXPORT else _run_mlir
    with wrap_errors(f"XLA cannot compile {path}"):
        compiled = run(path)

    def model(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = compiled([tensor.numpy() for tensor in inputs])
        return tuple(torch.from_numpy(np.array(result)) for result in results)

    return SourceModel(model, args, {}, None)


_Compiled = Callable[[list[Any]], Sequence[Any]]


def _run_export(path: Path) -> _Compiled:
    """Return the function of a serialized ``jax.export``; its sizes may be symbolic."""
    import jax
    from jax import export

    exported = export.deserialize(bytearray(path.read_bytes()))

    def run(arrays: list[Any]) -> Sequence[Any]:
        args, kwargs = jax.tree.unflatten(exported.in_tree, arrays)
        return jax.tree.leaves(exported.call(*args, **kwargs))

    return run


def _run_mlir(path: Path) -> _Compiled:
    """Return the function of MLIR, whose sizes are fixed."""
    import jax
    from jax.extend import backend

    from coreml_delegate.stablehlo.parse import mlir_module

    xla = xla_client()
    client = backend.get_backend("cpu")
    device = client.local_devices()[0]
    # A module belongs to its MLIR context; XLA parses the text in its own.
    compiled = client.compile_and_load(
        str(mlir_module(path)), xla.DeviceList((device,)), xla.CompileOptions()
    )

    def run(arrays: list[Any]) -> Sequence[Any]:
        buffers = [jax.device_put(array, device) for array in arrays]
        results = compiled.execute_sharded(buffers).disassemble_into_single_device_arrays()
        return [shards[0] for shards in results]

    return run
