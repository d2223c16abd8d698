"""Static 8-bit programs, and bf16, beside their fp32 form and beside XNNPACK and ONNX Runtime.

Every backend's own quantizer makes its 8-bit form, with the same images. Latencies are medians of
interleaved rounds in one process. As a program:
``python -m tests.benchmarks.int8 [MODEL ...] [--rounds N] [--threads N] [--markdown]``.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from support.tolerances import sqnr_db
from support.torchvision_models import build

from benchmarks.timing import Turn, race
from coreml_delegate import CoreMLBackend, CoreMLPartitioner, CoreMLQuantizer, runtime
from coreml_delegate.options.compile_specs import Precision

MODELS = ("mobilenet_v2", "resnet18", "vit_b_16")
_SIZE = 224  # pixels
_CALIBRATION = 8  # images
_INPUT = "image"


def _images() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.rand(1, 3, _SIZE, _SIZE) for _ in range(_CALIBRATION)]


def _quantized(module: torch.nn.Module, quantizer: Any) -> torch.nn.Module:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    images = _images()
    prepared = prepare_pt2e(torch.export.export(module, (images[0],)).module(), quantizer)
    for image in images:
        prepared(image)
    return convert_pt2e(prepared)


def _our_quantizer() -> Any:
    import coremltools as ct

    quantization = ct.optimize.torch.quantization
    eight_bits = quantization.ModuleLinearQuantizerConfig(
        quantization_scheme="symmetric",
        activation_dtype=torch.quint8,
        weight_dtype=torch.qint8,
        weight_per_channel=True,
    )
    return CoreMLQuantizer(quantization.LinearQuantizerConfig(global_config=eight_bits))


def _xnnpack_quantizer() -> Any:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))


def _ours(precision: Precision) -> Any:
    specs = CoreMLBackend.generate_compile_specs(compute_precision=precision)
    return CoreMLPartitioner(compile_specs=specs)


def _xnnpack() -> Any:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    return XnnpackPartitioner()


def _lowered(module: torch.nn.Module, partitioner: Any) -> bytes:
    from executorch.exir import to_edge_transform_and_lower

    with torch.no_grad():
        exported = torch.export.export(module, (_images()[0],))
    return to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch().buffer


Call = Callable[[], torch.Tensor]


def _here(program: bytes, image: torch.Tensor, precision: str = "f32") -> Call:
    options = runtime.EngineOptions(precision=precision)
    loaded = runtime.load_program(program, host="python", engine="openvino", options=options)
    return lambda: loaded.run("forward", [image])[0]


def _stock(program: bytes, image: torch.Tensor) -> Call:
    from executorch.runtime import Runtime

    loaded = Runtime.get().load_program(program)
    method = loaded.load_method("forward")
    kept = (loaded, method)  # the runtime reads from the program
    return lambda: kept[1].execute([image])[0]


def _onnx_runtime(path: Path, image: torch.Tensor, threads: int) -> Call:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {_INPUT: image.numpy()}
    return lambda: torch.from_numpy(session.run(None, feeds)[0])


def _onnx_files(module: torch.nn.Module, folder: Path) -> Mapping[str, Path]:
    """Export to ONNX, and quantize as ONNX Runtime's documentation says, by form."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    paths = {form: folder / f"{form}.onnx" for form in ("fp32", "prepared", "int8")}
    images = _images()
    with torch.no_grad():
        torch.onnx.export(
            *(module, (images[0],), paths["fp32"]),
            input_names=[_INPUT],
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    quant_pre_process(str(paths["fp32"]), str(paths["prepared"]), skip_symbolic_shape=True)

    left = iter(images)

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, Any] | None:
            image = next(left, None)
            return None if image is None else {_INPUT: image.numpy()}

    quantization.quantize_static(
        str(paths["prepared"]), str(paths["int8"]), Reader(), per_channel=True
    )
    return {form: paths[form] for form in ("fp32", "int8")}


def _programs(
    module: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, bytes, Callable[[bytes, torch.Tensor], Call]]]:
    """Name, model in PyTorch, ``.pte`` and loader of each form that ExecuTorch lowers."""
    ours, theirs = _quantized(module, _our_quantizer()), _quantized(module, _xnnpack_quantizer())
    yield "XNNPACK fp32", module, _lowered(module, _xnnpack()), _stock
    yield "XNNPACK int8", theirs, _lowered(theirs, _xnnpack()), _stock
    fp32 = _lowered(module, _ours(Precision.FLOAT32))
    yield "ours fp32", module, fp32, _here
    yield "ours bf16", module, fp32, lambda program, image: _here(program, image, "bf16")
    for rest in (Precision.FLOAT32, Precision.FLOAT16):
        name = f"ours int8, the rest {'fp32' if rest is Precision.FLOAT32 else 'fp16'}"
        yield name, ours, _lowered(ours, _ours(rest)), _here


def measure(name: str, rounds: int, threads: int) -> list[list[str]]:
    """The rows of one model: name, MB of the file, ms, and dB against its PyTorch model.

    That of a form quantized by ONNX Runtime is the model in fp32.
    """
    module, _ = build(name, _SIZE)
    image = _images()[-1]
    rows: dict[str, list[str]] = {}
    calls: dict[str, Turn] = {}

    def add(form: str, model: torch.nn.Module, size: int, call: Call) -> None:
        with torch.no_grad():
            sqnr = sqnr_db(model(image).numpy(), call().float().numpy())
        rows[form] = [f"{size / 1e6:.2f}", f"{sqnr:.1f}"]
        calls[form] = Turn(call)

    for form, model, program, load in _programs(module):
        add(form, model, len(program), load(program, image))
    if importlib.util.find_spec("onnxruntime") is not None:
        with tempfile.TemporaryDirectory(prefix="coreml-delegate-benchmarks-") as folder:
            for form, path in _onnx_files(module, Path(folder)).items():
                call = _onnx_runtime(path, image, threads)
                add(f"ONNX Runtime {form}", module, path.stat().st_size, call)
    seconds = race(calls, rounds)
    return [[form, size, f"{1e3 * seconds[form]:.2f}", db] for form, (size, db) in rows.items()]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.int8")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    headers = ("", "MB", "ms", "dB against its PyTorch model")
    for name in options.models or MODELS:
        rows = measure(name, options.rounds, options.threads)
        title = f"{name}, 1x3x{_SIZE}x{_SIZE}"
        if options.markdown:
            lines = [(title, *headers[1:]), ("---", "---:", "---:", "---:"), *rows]
            print("\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
            continue
        table = Table(title=title, title_justify="left")
        for header in headers:
            table.add_column(header, justify="right" if header else "left")
        for row in rows:
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    main()
