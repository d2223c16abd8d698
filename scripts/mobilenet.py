"""The demonstration: MobileNetV2 is exported, run on a photograph, compared and extracted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from coreml_delegate.backend import CoreMLBackend
from coreml_delegate.exported.source_model import SourceModel
from coreml_delegate.formats.files import provisional_folder, write_folder
from coreml_delegate.partition import CoreMLPartitioner, DelegationReport
from coreml_delegate.partition.export import export_model, lower_methods
from coreml_delegate.patches.third_party import import_optional
from coreml_delegate.runtime import LoadedProgram, load
from coreml_delegate.runtime.accuracy import Accuracy
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts import console
from coreml_delegate.scripts.arguments import new_output
from coreml_delegate.scripts.delegates import all_partitions, models_of
from coreml_delegate.scripts.inputs import vision

_MODEL = "mobilenet_v2"
_PHOTO = "china.jpg"
_CALIBRATION_BATCHES = 8
_CALIBRATION_BATCH = 8


def demonstrate(folder: Path, *, seed: int, repeat: int) -> None:
    """Export, report, run, compare and extract; print a summary on stdout.

    Args:
        folder: Created if needed; ``mv2.pte`` and ``mv2.mlpackage`` in it are replaced.
        seed: Seed of the random weights.
        repeat: Number of timed runs, of the program and of eager PyTorch each.

    Raises:
        CoreMLDelegateError: A step failed, or an optional dependency is missing.
        OSError: The folder cannot be written.
    """
    with provisional_folder(folder):
        _demonstrate(folder, seed=seed, repeat=repeat)


def _demonstrate(folder: Path, *, seed: int, repeat: int) -> None:
    photo = _photo()
    with console.step(f"Building {_MODEL} and calibrating its batch normalisation"):
        model = _build_calibrated(photo, seed)
        image = _preset()(photo).unsqueeze(0).contiguous()  # decoded photos are channels-last
    source = SourceModel(model, (image,), {}, None)
    path = folder / "mv2.pte"
    report = _export(source, path)
    console.write(f"{report.to_table()}\n")
    with console.step("Running on the photo"):
        program = load(path)
        in_own_types = load(path, engine=None)
        (expected,) = source.run([image])
        actual = _sole_tensor(program, image)
        accuracy = Accuracy()
        accuracy.add(expected, _sole_tensor(in_own_types, image))
        ours, eager = _latencies(
            [lambda: program.run([image]), lambda: source.run([image])], repeat
        )
    package = _extract(path, folder)
    package_bytes = sum(file.stat().st_size for file in package.rglob("*") if file.is_file())
    rows = [
        ("delegated nodes", f"{len(report.delegated)} of {len(report.nodes)}"),
        ("partitions", len(report.partitions)),
        (str(path), console.size(path.stat().st_size)),
        (str(package), console.size(package_bytes)),
        ("extracted package", _compare_package(package, image, actual)),
        ("SQNR against eager PyTorch", f"{accuracy.sqnr_db:.1f} dB ({in_own_types.execution})"),
        ("same class", "yes" if accuracy.top1_agreement == 1 else "no"),
        ("latency", f"{ours:.2f} ms (shortest of {repeat}, batch 1; {program.execution})"),
        ("latency of eager PyTorch", f"{eager:.2f} ms ({eager / ours:.1f} times ours)"),
    ]
    console.write(console.columns(rows))


def _photo() -> Any:
    """Return a photograph that scikit-learn contains, as a PIL image."""
    datasets = import_optional("sklearn.datasets")
    return import_optional("PIL.Image").fromarray(datasets.load_sample_image(_PHOTO))


def _preset() -> Any:
    """Return torchvision's own preprocessing for this model."""
    return vision.import_torchvision().models.get_model_weights(_MODEL).DEFAULT.transforms()


def _build_calibrated(photo: Any, seed: int) -> nn.Module:
    """Build the model with random weights and the batch statistics of crops of the photo.

    Without the statistics activations shrink from layer to layer until they underflow in fp16.
    """
    transforms = vision.import_torchvision().transforms
    preset = _preset()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = vision.build_model(_MODEL)
        crop = transforms.Compose(
            [
                transforms.RandomResizedCrop(preset.crop_size[0], scale=(0.2, 1.0)),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(preset.mean, preset.std),
            ]
        )
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain average over the batches
            norm.train()
        with torch.no_grad():
            for _ in range(_CALIBRATION_BATCHES):
                model(torch.stack([crop(photo) for _ in range(_CALIBRATION_BATCH)]))
    return model.eval()


def _export(source: SourceModel, path: Path) -> DelegationReport:
    partitioner = CoreMLPartitioner(compile_specs=CoreMLBackend.generate_compile_specs())
    with console.step("Exporting with torch.export"):
        exported = export_model(source)
    with console.step("Lowering to Core ML"):
        program = lower_methods({"forward": exported}, partitioner)
    with new_output(path, force=True) as file:
        program.write_to_file(file)
    return partitioner.report


def _extract(path: Path, folder: Path) -> Path:
    """Write the model of the first partition; MobileNetV2 has only one."""
    package = folder / "mv2.mlpackage"
    partition = all_partitions(PteProgram.open(path))[0]
    write_folder(models_of(partition.blob)[0].files, package, overwrite=True)
    return package


def _sole_tensor(loaded: LoadedProgram, image: torch.Tensor) -> torch.Tensor:
    (result,) = loaded.run([image]).values()
    return cast("torch.Tensor", result)


def _compare_package(package: Path, image: torch.Tensor, expected: torch.Tensor) -> str:
    """Say whether the extracted package and the whole program give the same output."""
    actual = _sole_tensor(load(package), image)
    same = torch.equal(actual.to(expected.dtype), expected)
    return "gives the same output as the .pte" if same else "gives another output than the .pte"


def _latencies(actions: Sequence[Callable[[], object]], repeat: int) -> list[float]:
    """Return the shortest time of each action, in milliseconds.

    Other processes only lengthen calls, and one action's more than another's; so calls are
    interleaved, and their shortest times compared.
    """
    shortest = [math.inf] * len(actions)
    for _ in range(repeat):
        for number, action in enumerate(actions):
            start = time.perf_counter()
            action()
            shortest[number] = min(shortest[number], (time.perf_counter() - start) * 1e3)
    return shortest
