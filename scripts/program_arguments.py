"""Load the programs that commands name, and read or draw their inputs."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from coreml_delegate import runtime
from coreml_delegate.exported.source_model import SourceModel
from coreml_delegate.runtime.engines.selection import REFERENCE
from coreml_delegate.runtime.loading import (
    Input,
    LoadedModel,
    LoadedProgram,
    refuse_pte_options,
)
from coreml_delegate.runtime.program.bundle import BundledCase, cases_of
from coreml_delegate.runtime.program.pte import map_source
from coreml_delegate.scripts import quantization_options
from coreml_delegate.scripts.arguments import BUNDLE_SUFFIX, keywords_of
from coreml_delegate.scripts.inputs.input_files import random_inputs, read_inputs
from coreml_delegate.scripts.inputs.random_tensors import generator
from coreml_delegate.scripts.stablehlo_files import LoadedStableHLO, compile_file, is_stablehlo

DEBUG_BUFFER: Final = 2**30
"""Bytes that the values of a traced run may take."""


def load(path: Path, **options: Any) -> LoadedProgram:
    """Load a program.

    Args:
        path: StableHLO file, or any program that ``runtime.load`` takes.
        options: See ``runtime.load``.

    Raises:
        CoreMLDelegateError: See ``runtime.load``.
    """
    if not is_stablehlo(path):
        return runtime.load(path, **options)
    engine = options.pop("engine", runtime.AUTO)
    engine_options = options.pop("options", None) or runtime.EngineOptions()
    options.pop("debug_buffer_size", None)
    refuse_pte_options(path, **options)
    return LoadedStableHLO(compile_file(path, engine, engine_options), engine_options)


def load_for(args: argparse.Namespace, path: Path | None = None, **changes: Any) -> LoadedProgram:
    """Load a program by the arguments of ``add_execution`` and ``add_data``.

    Args:
        args: The arguments.
        path: The program; None for ``args.program``.
        changes: Options of ``load`` that replace the arguments'.

    Raises:
        CoreMLDelegateError: See ``runtime.load``.
    """
    options: dict[str, Any] = {
        "method": args.method,
        "data": args.data or None,
        "host": args.host,
        "engine": args.engine,
        "options": engine_options(args),
    }
    return load(args.program if path is None else path, **(options | changes))


def load_to_diagnose(path: Path, method: str | None, data: Sequence[Path] = ()) -> LoadedProgram:
    """Load a program on the engine that shows its values; of StableHLO, its Core ML model.

    Args:
        path: The program.
        method: Its method, or None for the default.
        data: External data of a ``.pte``.

    Raises:
        CoreMLDelegateError: See ``runtime.load``.
    """
    if not is_stablehlo(path):
        return runtime.load(path, method=method, data=data or None, engine=REFERENCE.name)
    refuse_pte_options(path, method=method)
    model = compile_file(path, REFERENCE.name).executable.model
    return LoadedModel(model, path.stem, runtime.EngineOptions())


def bundled_cases(path: Path, method: str | None) -> list[BundledCase]:
    """Read the cases in a bundled program, of one method or of all.

    Raises:
        BlobFormatError: The file is malformed.
        ProgramError: The file cannot be read.
    """
    view, _ = map_source(path, "the program", f"a {BUNDLE_SUFFIX} file")
    return [case for case in cases_of(view) if method in (None, case.method)]


def engine_options(args: argparse.Namespace) -> runtime.EngineOptions:
    """Return the engine options of the arguments of ``add_engine``."""
    return runtime.EngineOptions(**keywords_of(args, runtime.EngineOptions))


def inputs_for(args: argparse.Namespace, program: LoadedProgram) -> list[Any]:
    """Return the inputs that ``--input`` names, or random inputs of ``--seed``."""
    if args.input:
        return read_inputs(args.input, program.inputs)
    return random_inputs(program.inputs, generator(args.seed))


def calibration_samples(args: argparse.Namespace, inputs: Sequence[Input]) -> list[list[Any]]:
    """Read the data of ``--calibration`` for the inputs of a program.

    Raises:
        OptionError: The data cannot be read or do not fit the inputs.
    """
    examples = {
        input_.name: torch.empty(input_.shape, dtype=input_.dtype)
        if input_.is_tensor
        else input_.fixed
        for input_ in inputs
    }
    like = SourceModel(module=lambda **values: values, args=(), kwargs=examples, exported=None)
    image = inputs[0].image if len(inputs) == 1 else None
    return quantization_options.read_samples(args, like, image)


def median_latency(program: LoadedProgram, inputs: Sequence[Any], repeat: int) -> float:
    """Return the median of ``repeat`` runs in milliseconds, of a program that has run before."""
    times: list[float] = []
    for _ in range(repeat):
        start = time.perf_counter()
        program.run(inputs)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)
