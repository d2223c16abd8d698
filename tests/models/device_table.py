"""Writes the table of the form for the neural engine in ``docs/models.md``: ``make models``.

With names of models, it measures only them; without, the models that have no row yet.
The page is written after each.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from models import libraries
from models.architectures import ARCHITECTURES, Architecture
from models.measuring import expected_outputs, worst_db
from models.model_table import decibels, number, write_rows
from models.rows import ROWS, Row
from torch import nn

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.device_check import check
from coreml_delegate.device_check.records import CheckedModel
from coreml_delegate.formats.caches import CACHE_VARIABLE
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.device_findings import models_of_pte
from coreml_delegate.targets import Device, Opset

SECTION = "devices"
NAMES = (
    *("alexnet", "vgg11_bn", "resnet34", "regnet_x_400mf", "shufflenet_v2_x1_5", "squeezenet1_0"),
    *("mobilenet_v3_large", "efficientnet_b1", "convnext_small", "swin_v2_t", "mc3_18"),
    *("deeplabv3_resnet50", "ssdlite320_mobilenet_v3_large", "retinanet_resnet50_fpn"),
    *("fasterrcnn_mobilenet_v3_large_320_fpn", "YOLOv8 head", "DETR, ResNet-50", "YOLOS tiny"),
    *("SegFormer B0", "SAM base, image encoder", "Depth Anything small", "DPT"),
    *("Stable Diffusion 1, UNet", "Stable Diffusion, decoder", "CLIP base, text encoder"),
    *("wav2vec 2.0 base, CTC", "Whisper tiny, encoder", "PointNet", "DGCNN, a layer"),
    *("timm convnextv2_atto", "timm edgenext_xx_small", "timm efficientvit_b0"),
    *("timm eva02_tiny_patch14_224", "timm fastvit_t8", "timm ghostnetv2_100", "timm levit_128s"),
    *("timm mobilevit_xxs", "timm poolformer_s12", "timm tinynet_e"),
    *("BERT, tied weights", "roberta", "distilbert", "electra", "deberta", "mpnet", "vit", "deit"),
)
WHISPER = Row("Whisper tiny, encoder", "transformers", "30 s", libraries.whisper_encoder)
MODELS: tuple[Row | Architecture, ...] = tuple(
    row for name in NAMES for row in (WHISPER, *ROWS, *ARCHITECTURES) if row.name == name
)
_TITLES = (
    *("model", "findings", "shaped", "upstream", "stay", "MIL ops", "shaped", "upstream"),
    *("partitions", "shaped", "upstream", "dB", "shaped"),
)
_PROGRAMS = ("plain", "shaped", "upstream")
_STAY = _TITLES.index("stay")
_OPTIONS = {"minimum_deployment_target": Opset.iOS18}


@dataclass(frozen=True)
class Lowered:
    """A program of a model.

    Attributes:
        findings: Findings whose remedy a lowering for the neural engine carries out.
        ops: MIL ops, without constants.
        partitions: Core ML delegates.
        stay: Findings of such rules where the lowering has an obstacle to the remedy.
        db: Of the worst output over eager PyTorch in fp16, on ``reference``; None if it is not
            compared.
    """

    findings: int
    ops: int
    partitions: int
    stay: int = 0
    db: float | None = None


def measure(row: Row | Architecture, *, has_upstream: bool) -> dict[str, Lowered]:
    """Lower a model plainly and for the neural engine, and with upstream's partitioner.

    Args:
        row: The model.
        has_upstream: Whether to import upstream's backend, which stays in the process.
    """
    model, inputs = row.build()
    compared = not (isinstance(row, Row) and row.picks)
    expected = expected_outputs(model, inputs)
    programs: dict[str, bytes | None] = {
        "plain": _ours(model, inputs, None),
        "shaped": _ours(model, inputs, Device.NEURAL_ENGINE),
    }
    if has_upstream:
        programs["upstream"] = _theirs(model, inputs)
    measured: dict[str, Lowered] = {}
    for who, pte in programs.items():
        db = None
        if compared and who != "upstream" and pte is not None:
            program = runtime.load_program(pte, engine="reference")
            db = worst_db(expected, program.run("forward", list(inputs)))
        measured[who] = _lowered(pte, db)
    return measured


def _ours(model: nn.Module, inputs: tuple[torch.Tensor, ...], device: Device | None) -> bytes:
    specs = CoreMLBackend.generate_compile_specs(**_OPTIONS)
    return _lower(model, inputs, CoreMLPartitioner(compile_specs=specs, device=device))


def _theirs(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> bytes | None:
    from executorch.backends.apple.coreml.compiler import CoreMLBackend as TheirBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner as TheirPartitioner

    target = coremltools().target.iOS18
    specs = TheirBackend.generate_compile_specs(minimum_deployment_target=target)
    try:
        return _lower(model, inputs, TheirPartitioner(compile_specs=specs))
    except Exception as error:  # noqa: BLE001 - whatever upstream raises, the table shows a dash
        sys.stderr.write(f"upstream: {type(error).__name__}: {str(error)[:200]}\n")
        return None


def _lower(model: nn.Module, inputs: tuple[torch.Tensor, ...], partitioner: Any) -> bytes:
    with torch.no_grad():
        manager = to_edge_transform_and_lower(
            torch.export.export(model, inputs),
            partitioner=[partitioner],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
    return bytes(manager.to_executorch().buffer)


def _lowered(pte: bytes | None, db: float | None) -> Lowered:
    if pte is None:
        return Lowered(-1, -1, -1)
    models: Sequence[CheckedModel] = models_of_pte(PteProgram.open(pte)).checked
    findings = [
        finding
        for finding in check(models)
        if (rewrite := finding.rule.rewrite) and Device.NEURAL_ENGINE in rewrite.devices
    ]
    mendable = [finding for finding in findings if finding.rewrite is not None]
    views = [view for model in models for view in model.views]
    partitions = sum(len(model.uses) for model in models)
    return Lowered(
        len(mendable),
        sum(len(view.ops) for view in views),
        partitions,
        len(findings) - len(mendable),
        db,
    )


def rows(measured: Mapping[str, Mapping[str, Lowered]]) -> Iterator[str]:
    """Yield the lines of the table.

    Args:
        measured: The programs by model.
    """
    yield f"| {' | '.join(_TITLES)} |"
    yield f"|{'---|' * len(_TITLES)}"
    for row in MODELS:
        programs = measured.get(row.name)
        if programs is None:
            continue
        cells = [f"`{row.name}`"]
        for count in (lambda p: p.findings, lambda p: p.ops, lambda p: p.partitions):
            numbers = (count(programs[who]) for who in _PROGRAMS)
            cells += ["-" if number < 0 else str(number) for number in numbers]
        cells.insert(_STAY, str(programs["shaped"].stay))
        cells += [decibels(programs[who].db) for who in ("plain", "shaped")]
        yield f"| {' | '.join(cells)} |"


def read(text: str) -> dict[str, dict[str, Lowered]]:
    """Return the rows that a page has, by model."""
    measured: dict[str, dict[str, Lowered]] = {}
    section = text.partition(f"<!-- {SECTION} -->")[2].partition(f"<!-- end of {SECTION} -->")[0]
    for line in section.splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split(" | ")]
        if len(cells) != len(_TITLES) or not cells[1].removeprefix("-").isdigit():
            continue
        stay = (0, int(cells.pop(_STAY)), 0)  # of the program for the neural engine only
        numbers = [-1 if cell == "-" else int(cell) for cell in cells[1:10]]
        dbs = [*(number(cell) for cell in cells[10:]), None]
        measured[cells[0]] = {
            who: Lowered(numbers[n], numbers[3 + n], numbers[6 + n], stay[n], dbs[n])
            for n, who in enumerate(_PROGRAMS)
        }
    return measured


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder  # the tables of others stay theirs
        write_rows(SECTION, MODELS, sys.argv[1:], read, rows, partial(measure, has_upstream=True))
