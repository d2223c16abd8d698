"""From a subgraph to a blob: contract, conversion errors, temporary files, identifier, options."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge
from executorch.exir.backend.compile_spec_schema import CompileSpec
from support.lowering import Function, build_blob, fp32_specs
from support.tolerances import sqnr_db
from torch import nn
from torch.export import ExportedProgram

from coreml_delegate import CoreMLBackend, runtime
from coreml_delegate.errors import (
    ContractError,
    ConversionError,
    LoweringError,
    OptionError,
    UnsupportedOperatorError,
)
from coreml_delegate.formats.blob import unflatten
from coreml_delegate.formats.blob_layout import METADATA, ModelMetadata
from coreml_delegate.lowering import build
from coreml_delegate.lowering.contract import BOUNDARY_DTYPES, boundary_of, check_program
from coreml_delegate.lowering.model_files import Conversion
from coreml_delegate.options.compile_specs import ModelType, Precision
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.runtime.delegate import read_blob
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Op, Program
from coreml_delegate.targets import ComputeUnit, Opset

FP32 = CompileOptions(precision=Precision.FLOAT32)


class Linear(nn.Module):
    """A linear layer large enough for coremltools to compress."""

    def __init__(self, seed: int = 0, features: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def edge_program(module: nn.Module, *inputs: torch.Tensor) -> ExportedProgram:
    return to_edge(torch.export.export(module.eval(), inputs)).exported_program()


def linear(seed: int = 0, features: int = 4) -> ExportedProgram:
    return edge_program(Linear(seed, features), torch.ones(2, features))


def ops(blob: bytes) -> list[Op]:
    program, _ = read_blob(blob)
    return list(program.functions[program.default_function].block.walk())


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """The folder for temporary files, empty at first."""
    with mock.patch.object(tempfile, "tempdir", str(tmp_path)):
        yield tmp_path


# The blob


def test_metadata_names_the_features_of_the_model() -> None:
    files = unflatten(build_blob(linear(), FP32))
    metadata = ModelMetadata.decode(files[METADATA])
    program, _ = read_blob(build_blob(linear(), FP32))
    function = program.functions[program.default_function]
    names = metadata.method("forward")
    assert names.input_names == tuple(f.name for f in function.inputs)
    assert names.output_names == tuple(f.name for f in function.outputs)


def test_same_model_same_bytes() -> None:
    assert build_blob(linear(), FP32) == build_blob(linear(), FP32)


def test_different_models_have_different_identifiers() -> None:
    def identifier(program: ExportedProgram, options: CompileOptions) -> str:
        return read_blob(build_blob(program, options))[1].identifier

    names = [
        identifier(linear(seed=0), FP32),
        identifier(linear(seed=1), FP32),
        identifier(linear(seed=0), CompileOptions()),
        identifier(linear(seed=0), CompileOptions(deployment_target=Opset.iOS17)),
    ]
    assert len(set(names)) == len(names)
    assert names[0] == identifier(linear(seed=0), FP32)
    assert all("/" not in name and ".." not in name for name in names)


@pytest.mark.parametrize("target", list(Opset))
def test_the_deployment_target_is_the_opset_of_the_model(target: Opset) -> None:
    program, _ = read_blob(build_blob(linear(), CompileOptions(deployment_target=target)))
    assert program.specification_version == int(target)
    assert program.functions[program.default_function].opset == target.mil_name


def test_without_a_target_the_oldest_possible_opset_is_chosen() -> None:
    def version(module: nn.Module, *inputs: torch.Tensor) -> int:
        return read_blob(build_blob(edge_program(module, *inputs), FP32))[0].specification_version

    assert version(Linear(), torch.ones(2, 4)) == Opset.iOS15
    shuffle = to_edge(
        torch.export.export(
            Function(lambda x: torch.ops.aten.pixel_unshuffle(x, 2)), (torch.ones(1, 1, 4, 4),)
        ),
        compile_config=EdgeCompileConfig(preserve_ops=[torch.ops.aten.pixel_unshuffle.default]),
    )
    program, _ = read_blob(build_blob(shuffle.exported_program(), FP32))
    assert program.specification_version == Opset.iOS16


@pytest.mark.parametrize(
    ("precision", "dtype"), [(Precision.FLOAT32, DType.FP32), (Precision.FLOAT16, DType.FP16)]
)
def test_precision_sets_the_dtype_of_the_ops(precision: Precision, dtype: DType) -> None:
    blob = build_blob(linear(), CompileOptions(precision=precision))
    (relu,) = [op for op in ops(blob) if op.type == "relu"]
    assert relu.outputs[0].type.dtype is dtype  # pyright: ignore[reportAttributeAccessIssue]


# Integers keep their 32 bits (coremltools narrows them to 16 with fp16)


def test_integers_keep_their_width_in_fp16() -> None:
    module = Function(lambda x, index: torch.index_select(x, 0, index).squeeze(1))
    x = torch.tensor([[70000], [-1], [2**24 + 1]])
    index = torch.tensor([2, 0, 1])
    blob = build_blob(edge_program(module, x, index), CompileOptions(deployment_target=Opset.iOS17))
    model = runtime.load_blob(blob, engine="reference")
    names = model.input_names
    results = model.predict({names[0]: x.to(torch.int32), names[1]: index.to(torch.int32)})
    (actual,) = results.values()
    assert actual.tolist() == module(x, index).tolist()


# The contract with the device


def check(module: nn.Module, *inputs: torch.Tensor, target: Opset | None = None) -> None:
    check_program(boundary_of(edge_program(module, *inputs), FP32), target)


def test_a_program_needs_an_output() -> None:
    with pytest.raises(ContractError) as raised:
        check(Function(lambda x: ()), torch.ones(2))
    assert str(raised.value) == "subgraph has no output: expected at least one"


def test_only_tensors_cross_the_boundary() -> None:
    with pytest.raises(ContractError, match="only tensors can cross into Core ML"):
        boundary_of(edge_program(Function(lambda x: (x + 1, 3)), torch.ones(2)), FP32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_dtypes_that_the_device_does_not_convert_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ContractError) as raised:
        check(Function(torch.neg), torch.ones(2).to(dtype))
    assert "cannot cross into Core ML" in str(raised.value)
    assert raised.value.got == str(dtype)
    assert raised.value.remedy == "Cast it in the model"


@pytest.mark.parametrize("dtype", sorted(BOUNDARY_DTYPES, key=str))
def test_dtypes_that_the_device_converts_are_accepted(dtype: torch.dtype) -> None:
    check(Function(lambda x: x.clone()), torch.ones(2).to(dtype))


def test_empty_tensors_at_the_boundary_are_refused() -> None:
    with pytest.raises(ContractError, match=r"is empty: got \(2, 0\)"):
        check(Function(torch.relu), torch.ones(2, 0))


class Counter(nn.Module):
    """A state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1.0)
        return x + self.count


def test_states_need_ios18() -> None:
    with pytest.raises(ContractError) as raised:
        check(Counter(), torch.ones(1), target=Opset.iOS17)
    assert str(raised.value) == (
        "mutable buffers as states (count) need iOS18 (iOS18, macOS15, watchOS11, tvOS18): "
        "got minimum_deployment_target iOS17. "
        "Raise it, or set take_over_mutable_buffer=False"
    )
    check(Counter(), torch.ones(1), target=Opset.iOS18)


def test_models_without_inputs_need_ios18() -> None:
    module = Function(lambda: torch.full((2,), 1.5))
    with pytest.raises(ContractError, match="a model without inputs need iOS18"):
        check(module, target=Opset.iOS16)
    program, _ = read_blob(build_blob(edge_program(module), FP32))
    assert program.specification_version == Opset.iOS18


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda d: d.output.add().CopyFrom(d.output[0]), "different number of outputs"),
        (lambda d: d.input.pop(), "different number of inputs"),
        (lambda d: d.input[0].type.multiArrayType.shape.append(7), "different rank"),
        (lambda d: setattr(d.output[0], "name", d.input[0].name), "are not unique"),
    ],
)
def test_converted_models_that_break_the_contract_are_refused(break_it: Any, message: str) -> None:
    intact = build._convert

    def broken(*args: Any, **keywords: Any) -> Conversion:
        conversion = intact(*args, **keywords)
        break_it(conversion.spec.description)
        return conversion

    with (
        mock.patch.object(build, "_convert", broken),
        pytest.raises(ContractError, match=message),
    ):
        build_blob(linear(), FP32)


# Failures, and what they leave behind


def test_every_unsupported_operator_is_listed() -> None:
    module = Function(lambda x: torch.asinh(x) + torch.acosh(x))
    with pytest.raises(UnsupportedOperatorError) as raised:
        build_blob(edge_program(module, torch.ones(2)), FP32)
    assert "aten.asinh.default" in str(raised.value)
    assert "aten.acosh.default" in str(raised.value)


@pytest.mark.parametrize("error", [ValueError("first line\nsecond"), AssertionError(), KeyError()])
def test_conversion_errors_are_wrapped(temporary: Path, error: Exception) -> None:
    with (
        mock.patch.object(coremltools(), "convert", side_effect=error),
        pytest.raises(ConversionError) as raised,
    ):
        build_blob(linear(), FP32)
    told = "ValueError: first line" if isinstance(error, ValueError) else type(error).__name__
    assert str(raised.value) == (
        "coremltools cannot convert the subgraph: "
        f"got {told}. "
        "Exclude the operator with skip_ops_for_coreml_delegation"
    )
    assert raised.value.__cause__ is error
    assert not list(temporary.iterdir())


def test_an_interrupt_leaves_no_temporary_files(temporary: Path) -> None:
    with (
        mock.patch.object(coremltools(), "convert", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        build_blob(linear(), FP32)
    assert not list(temporary.iterdir())


def test_success_leaves_no_temporary_files(temporary: Path) -> None:
    build_blob(linear(), FP32)
    assert not list(temporary.iterdir())


def test_a_failure_after_the_conversion_leaves_no_temporary_files(temporary: Path) -> None:
    with (
        mock.patch.object(
            coremltools().optimize.coreml,
            "linear_quantize_weights",
            side_effect=RuntimeError("late"),
        ),
        pytest.raises(ConversionError, match="late"),
    ):
        build_blob(linear(), CompileOptions(op_linear_quantizer_config={"mode": "linear"}))
    assert not list(temporary.iterdir())


def test_compiled_models_need_a_compiler() -> None:
    options = CompileOptions(model_type=ModelType.COMPILED_MODEL)
    with (
        mock.patch("shutil.which", return_value=None),
        pytest.raises(LoweringError) as raised,
    ):
        build_blob(linear(), options)
    assert str(raised.value) == (
        "model_type COMPILED_MODEL needs Core ML's compiler, which only macOS has. "
        "Use MODEL_TYPE.MODEL (the device compiles at first load), or export on a Mac"
    )


# Options that change the conversion


def test_weights_are_quantized() -> None:
    config = {"mode": "linear_symmetric", "dtype": "int8", "weight_threshold": 16}
    program = linear(features=64)
    quantized = build_blob(program, CompileOptions(op_linear_quantizer_config=config))
    plain = build_blob(linear(features=64), CompileOptions())
    # Without a sign below iOS18: apple/coremltools#2675.
    assert "uint8" in weight_dtypes(quantized)
    assert "uint8" not in weight_dtypes(plain)
    assert len(quantized) < len(plain)
    x = torch.rand(2, 64)
    expected = Linear(features=64)(x).detach().numpy()
    model = runtime.load_blob(quantized, engine="reference")
    (actual,) = model.predict({model.input_names[0]: x.numpy()}).values()
    assert sqnr_db(expected, actual) > 35  # int8 per channel


def weight_dtypes(blob: bytes) -> set[str]:
    """Dtypes of the stored constants."""
    found: set[str] = set()
    for op in ops(blob):
        for constant in op.attributes.values():
            if constant.offset is not None:
                found.add(constant.type.dtype.label)  # pyright: ignore[reportAttributeAccessIssue]
        for bindings in op.inputs.values():
            for binding in bindings:
                if getattr(binding, "offset", None) is not None:
                    found.add(binding.type.dtype.label)  # pyright: ignore
    return found


def test_an_unknown_quantizer_value_is_named() -> None:
    options = CompileOptions(op_linear_quantizer_config={"mode": "mood"})
    with pytest.raises(OptionError) as raised:
        build_blob(linear(), options)
    assert "coremltools does not accept op_linear_quantizer_config" in str(raised.value)
    assert "mood" in str(raised.value)


def test_only_the_named_passes_run() -> None:
    none = build_blob(linear(), CompileOptions(pass_names=()))
    cast = build_blob(
        linear(), CompileOptions(pass_names=("common::add_fp16_cast", "common::cast_optimization"))
    )
    assert DType.FP16 not in computed(none)
    assert DType.FP16 in computed(cast)


@pytest.mark.parametrize("frozen", [False, True])
def test_objects_that_the_caller_froze_stay_frozen(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In place of the quick answer that conftest.py has for all other tests.
    monkeypatch.setattr(gc, "get_freeze_count", gc.get_freeze_count.__wrapped__)
    before = gc.get_freeze_count()
    if frozen:
        gc.freeze()
    else:
        gc.unfreeze()
    try:
        build_blob(linear(), CompileOptions())
        assert (gc.get_freeze_count() > 0) is frozen
    finally:
        if before:
            gc.freeze()
        else:
            gc.unfreeze()


def computed(blob: bytes) -> set[DType]:
    return {
        output.type.dtype  # pyright: ignore[reportAttributeAccessIssue]
        for op in ops(blob)
        for output in op.outputs
    }


def test_unknown_passes_are_refused() -> None:
    with pytest.raises(OptionError, match="unknown coremltools pass: got 'common::dead_code'"):
        build_blob(linear(), CompileOptions(pass_names=("common::dead_code",)))


def test_preprocess_writes_the_canonical_specs_back() -> None:
    specs = [CompileSpec("compute_units", b"gpu")]
    result = CoreMLBackend.preprocess(linear(), specs)
    assert specs == CompileOptions(compute_unit=ComputeUnit.CPU_AND_GPU).to_specs()
    program: Program = read_blob(result.processed_bytes)[0]
    assert program.functions
    assert fp32_specs()[0].key == "compute_units"
