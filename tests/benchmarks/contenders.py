"""Who takes part: how each loads its file and runs it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Arrays = Sequence[np.ndarray]
Call = Callable[[], Any]
"""Runs once; returns the first output, as anything ``numpy.asarray`` takes."""

Bind = Callable[[Arrays], Call]
"""Prepares a call on given inputs; calls share the state of what was loaded."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How contenders are loaded.

    Attributes:
        threads: CPU threads, the same for all.
        cache: Folder in which a contender may keep what it compiled.
    """

    threads: int
    cache: Path


class NotAvailableError(Exception):
    """A contender cannot take part here; the message says why."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run a workload.

    Attributes:
        name: Row of the table.
        file: What it loads, a name in ``EXPORTS``.
        load: Reads the file and compiles whatever there is to compile.
        imports: Imports what ``load`` and the first call need.
        requires: Packages that are not dependencies of this project.
        workloads: Those it can run, or None for all.
        caches: Whether it keeps in ``Settings.cache`` what makes loading the same file faster.
        share: Rounds it takes part in, of all.
        probed: Whether its load time and memory are measured.
    """

    name: str
    file: str
    load: Callable[[Path, Settings], Bind]
    imports: Callable[[], None]
    requires: tuple[str, ...] = ()
    workloads: frozenset[str] | None = None
    caches: bool = False
    share: float = 1.0
    probed: bool = True

    def unavailable(self, workload: str) -> str | None:
        """Why it cannot run ``workload`` here, as far as can be told without trying."""
        missing = [name for name in self.requires if importlib.util.find_spec(name) is None]
        if missing:
            return "not installed: pip install '.[bench]'"
        if self.workloads is not None and workload not in self.workloads:
            return "model not written for it"
        return None


def _imports(*names: str) -> Callable[[], None]:
    def imports() -> None:
        for name in names:
            importlib.import_module(name)

    return imports


def _with_models(*names: str) -> Callable[[], None]:
    """The same, and the classes of pickled modules."""

    def imports() -> None:
        from coreml_delegate.scripts.inputs.vision import import_torchvision

        import_torchvision()
        _imports("benchmarks.models", *names)()

    return imports


def _torch(threads: int) -> Any:
    import torch

    torch.set_num_threads(threads)
    return torch


def _tensors(torch: Any, inputs: Arrays) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(array) for array in inputs)


def _module(path: Path, settings: Settings) -> Any:
    return _torch(settings.threads).load(path, weights_only=False)


def _eager(path: Path, settings: Settings) -> Bind:
    torch, module = _torch(settings.threads), _module(path, settings)

    def bind(inputs: Arrays) -> Call:
        tensors = _tensors(torch, inputs)
        return torch.no_grad()(lambda: module(*tensors))

    return bind


def _inductor(path: Path, settings: Settings) -> Bind:
    torch = _torch(settings.threads)
    from torch._inductor import config, exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise NotAvailableError("no C++ compiler") from error
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(settings.cache)
    config.freezing = True
    module = torch.compile(_module(path, settings))

    def bind(inputs: Arrays) -> Call:
        tensors = _tensors(torch, inputs)
        return torch.no_grad()(lambda: module(*tensors))

    return bind


def _onnx_runtime(path: Path, settings: Settings) -> Bind:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]
    outputs = [port.name for port in session.get_outputs()]
    held = [
        ort.OrtValue.ortvalue_from_numpy(np.zeros(port.shape, np.float32))
        for port in session.get_inputs()[len(names) - len(outputs) + 1 :]
    ]

    def bind(inputs: Arrays) -> Call:
        fixed = {
            name: ort.OrtValue.ortvalue_from_numpy(array)
            for name, array in zip(names, inputs, strict=False)
        }
        caches = names[len(inputs) :]

        def call() -> Any:
            feeds = fixed | dict(zip(caches, held, strict=True))
            first, *held[:] = session.run_with_ort_values(outputs, feeds)
            return first.numpy()

        return call

    return bind


def _openvino(path: Path, settings: Settings) -> Bind:
    import openvino as ov

    compiled = ov.Core().compile_model(
        path,
        "CPU",
        {
            "INFERENCE_NUM_THREADS": settings.threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "CACHE_DIR": str(settings.cache),
        },
    )
    request = compiled.create_infer_request()
    states = len(compiled.outputs) - 1
    first = len(compiled.inputs) - states
    sides = [
        [ov.Tensor(port.element_type, port.shape) for port in compiled.inputs[first:]]
        for _ in range(2)
    ]
    for tensor in sides[0]:
        tensor.data[...] = 0

    def bind(inputs: Arrays) -> Call:
        tensors = [ov.Tensor(array) for array in inputs]

        def call() -> Any:
            for index, tensor in enumerate((*tensors, *sides[0])):
                request.set_input_tensor(index, tensor)
            for index, tensor in enumerate(sides[1]):
                request.set_output_tensor(index + 1, tensor)
            sides.reverse()
            request.infer()
            return request.get_output_tensor(0).data

        return call

    return bind


def _xnnpack(path: Path, settings: Settings) -> Bind:
    from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool

    _unsafe_reset_threadpool(settings.threads)
    return _on_stock_runtime(path, settings)


def _on_stock_runtime(path: Path, settings: Settings) -> Bind:
    torch = _torch(settings.threads)
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(path)
    method = program.load_method("forward")

    def bind(inputs: Arrays) -> Call:
        tensors = _tensors(torch, inputs)
        kept = (program, method)  # the runtime reads from the program
        return lambda: kept[1].execute(tensors)[0]

    return bind


def _xla(path: Path, settings: Settings) -> Bind:
    # Its CPU client has as many threads as the process has cores, which the harness limits.
    from benchmarks import jax_models

    return jax_models.load(_module(path, settings))


def _ours(engine: str, host: str) -> Callable[[Path, Settings], Bind]:
    def load(path: Path, settings: Settings) -> Bind:
        torch = _torch(settings.threads)
        from coreml_delegate import runtime

        cache = runtime.CacheOptions(settings.cache)
        options = runtime.EngineOptions(threads=settings.threads, cache=cache)
        if host == "stock":
            runtime.register(engine=engine, options=options)
            return _on_stock_runtime(path, settings)
        program = runtime.load_program(path, host=host, engine=engine, options=options)
        program.load_method("forward")

        def bind(inputs: Arrays) -> Call:
            tensors = _tensors(torch, inputs)
            return lambda: program.run("forward", tensors)[0]

        return bind

    return load


EAGER = "torch eager"

CONTENDERS = (
    Contender(EAGER, "module.pt", _eager, _with_models()),
    Contender(
        "torch.compile, freezing",
        "module.pt",
        _inductor,
        _with_models("torch._inductor.compile_fx"),
        caches=True,
    ),
    Contender(
        "ONNX Runtime",
        "model.onnx",
        _onnx_runtime,
        _imports("onnxruntime"),
        requires=("onnxruntime", "onnxscript"),
    ),
    Contender(
        "JAX/XLA",
        "module.pt",
        _xla,
        _with_models("benchmarks.jax_models"),
        requires=("jax",),
        workloads=frozenset({"decoder_prefill", "decoder_step", "mlp"}),
    ),
    Contender("XNNPACK .pte", "xnnpack.pte", _xnnpack, _imports("executorch.runtime")),
    Contender(
        "OpenVINO's own conversion", "openvino.xml", _openvino, _imports("openvino"), caches=True
    ),
    *(
        Contender(
            f"ours {precision}, {engine}{'' if host == 'python' else ', stock host'}",
            f"{precision}.pte",
            _ours(engine, host),
            _imports("coreml_delegate.runtime", "openvino", "openvino.passes"),
            caches=engine == "openvino",
            # The reference engine is the faithful one, not the fast one.
            share=0.2 if engine == "reference" else 1.0,
            # The host of a program that is one delegate does not matter to its loading.
            probed=host == "python",
        )
        for precision in ("float32", "float16")
        for engine, host in (("openvino", "python"), ("openvino", "stock"), ("reference", "python"))
    ),
)
"""In the order of the tables."""
