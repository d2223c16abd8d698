"""Static 8-bit programs beside their fp32 form and beside XNNPACK's.

Every model is quantized twice by PT2E with the same images, once by each backend's quantizer.
Latencies are medians of interleaved rounds in one process. As a program:
``python -m tests.benchmarks.int8 [MODEL ...] [--rounds N] [--threads N]``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[1]
if str(_TESTS) not in sys.path:
    sys.path.insert(0, str(_TESTS))

import torch  # noqa: E402 - after the path above
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from support.tolerances import sqnr_db  # noqa: E402
from support.torchvision_models import build  # noqa: E402

from benchmarks.timing import Turn, race  # noqa: E402
from coreml_delegate import CoreMLBackend, CoreMLPartitioner, CoreMLQuantizer, runtime  # noqa: E402
from coreml_delegate.compile_options import Precision  # noqa: E402

MODELS = ("mobilenet_v2", "resnet18")
_SIZE = 224  # pixels
_CALIBRATION = 8  # images


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


def _here(program: bytes, image: torch.Tensor) -> Callable[[], torch.Tensor]:
    loaded = runtime.load_program(program, host="python", engine="openvino")
    return lambda: loaded.run("forward", [image])[0]


def _stock(program: bytes, image: torch.Tensor) -> Callable[[], torch.Tensor]:
    from executorch.runtime import Runtime

    loaded = Runtime.get().load_program(program)
    method = loaded.load_method("forward")
    kept = (loaded, method)  # the runtime reads from the program
    return lambda: kept[1].execute([image])[0]


def measure(name: str, rounds: int) -> list[list[str]]:
    """The rows of one model: name, MB of the ``.pte``, ms, and dB against its PyTorch model."""
    module, _ = build(name, _SIZE)
    ours, theirs = _quantized(module, _our_quantizer()), _quantized(module, _xnnpack_quantizer())
    forms: Mapping[str, tuple[torch.nn.Module, Any, Any]] = {
        "XNNPACK fp32": (module, _xnnpack(), _stock),
        "XNNPACK int8": (theirs, _xnnpack(), _stock),
        "ours fp32": (module, _ours(Precision.FLOAT32), _here),
        "ours int8, rest fp32": (ours, _ours(Precision.FLOAT32), _here),
        "ours int8, rest fp16": (ours, _ours(Precision.FLOAT16), _here),
    }
    image = _images()[-1]
    rows: dict[str, list[str]] = {}
    calls: dict[str, Turn] = {}
    for form, (model, partitioner, load) in forms.items():
        program = _lowered(model, partitioner)
        call = load(program, image)
        with torch.no_grad():
            sqnr = sqnr_db(model(image).numpy(), call().float().numpy())
        rows[form] = [f"{len(program) / 1e6:.2f}", f"{sqnr:.1f}"]
        calls[form] = Turn(call)
    seconds = race(calls, rounds)
    return [[form, size, f"{1e3 * seconds[form]:.2f}", db] for form, (size, db) in rows.items()]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.int8")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    for name in options.models or MODELS:
        table = Table(title=f"{name}, 1x3x{_SIZE}x{_SIZE}", title_justify="left")
        for header in ("", "MB of .pte", "ms", "dB against the PyTorch model"):
            table.add_column(header, justify="right" if header else "left")
        for row in measure(name, options.rounds):
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    main()
