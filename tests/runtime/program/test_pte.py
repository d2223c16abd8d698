"""The reader of ``.pte`` files against ExecuTorch's own deserialiser, and on other bytes."""

from __future__ import annotations

import mmap
import struct

import pytest
from executorch.exir import schema
from executorch.exir._serialize._program import deserialize_pte_binary
from executorch.exir.tensor import scalar_type_enum
from support.delegated import two_methods
from support.programs import CASES, export_case

from coreml_delegate.errors import BlobFormatError, ProgramError
from coreml_delegate.runtime.program import plan
from coreml_delegate.runtime.program.pte import PteProgram


def _as_schema(value: plan.ValueSpec) -> object:
    """A value as ExecuTorch's own records have it."""
    lists = {
        plan.ListKind.INT: schema.IntList,
        plan.ListKind.TENSOR: schema.TensorList,
        plan.ListKind.OPTIONAL_TENSOR: schema.OptionalTensorList,
    }
    scalars = {
        bool: schema.Bool,
        int: schema.Int,
        float: schema.Double,
        str: schema.String,
    }
    if value is None:
        return schema.Null()
    if isinstance(value, plan.IndexList):
        return lists[value.kind](list(value.items))
    if isinstance(value, tuple):
        kind = schema.BoolList if isinstance(value[0], bool) else schema.DoubleList
        return kind(list(value))
    return scalars[type(value)](value)


def _as_instruction(instruction: plan.Instruction, operators: list[str]) -> object:
    match instruction:
        case plan.KernelCall(operator, args):
            return schema.KernelCall(operators.index(operator), list(args))
        case plan.DelegateCall(delegate, args):
            return schema.DelegateCall(delegate, list(args))
        case plan.MoveCall(source, target):
            return schema.MoveCall(source, target)
        case plan.JumpFalseCall(condition, target):
            return schema.JumpFalseCall(condition, target)
        case plan.FreeCall(value):
            return schema.FreeCall(value)


def _check_tensor(spec: plan.TensorSpec, expected: schema.Tensor) -> None:
    assert scalar_type_enum(spec.dtype) == expected.scalar_type
    assert list(spec.shape) == expected.sizes
    assert list(spec.dim_order) == expected.dim_order
    assert spec.dynamism.value == expected.shape_dynamism
    assert spec.buffer == expected.data_buffer_idx
    planned = expected.allocation_info
    assert spec.allocation == (
        plan.Allocation(planned.memory_id, planned.memory_offset) if planned else None
    )


@pytest.mark.share(3)
@pytest.mark.parametrize("name", [*CASES, "two_methods"])
def test_reads_what_executorch_reads(name: str) -> None:
    data = two_methods() if name == "two_methods" else export_case(name)[1]
    expected = deserialize_pte_binary(data)
    program = PteProgram.open(data)

    plans = expected.program.execution_plan
    assert program.method_names == tuple(plan.name for plan in plans)
    for method, theirs in zip(program.methods, plans, strict=True):
        operators = [f"{op.name}.{op.overload}".rstrip(".") for op in theirs.operators]
        assert list(method.inputs) == theirs.inputs
        assert list(method.outputs) == theirs.outputs
        assert list(method.arena_sizes) == theirs.non_const_buffer_sizes
        assert [
            [_as_instruction(item, operators) for item in chain] for chain in method.chains
        ] == [[item.instr_args for item in chain.instructions] for chain in theirs.chains]
        for value, evalue in zip(method.values, theirs.values, strict=True):
            if isinstance(value, plan.TensorSpec):
                _check_tensor(value, evalue.val)
            else:
                assert _as_schema(value) == evalue.val
        for delegate, other in zip(method.delegates, theirs.delegates, strict=True):
            assert delegate.backend_id == other.id
            inline = expected.program.backend_delegate_data[other.processed.index]
            assert delegate.processed == inline.data
            assert delegate.compile_specs == tuple(
                (spec.key, bytes(spec.value)) for spec in other.compile_specs
            )


@pytest.mark.parametrize("name", ["convolutions", "counter"])
def test_tensor_data_is_what_executorch_stored(name: str) -> None:
    data = export_case(name)[1]
    expected = deserialize_pte_binary(data)
    program = PteProgram.open(data)
    stored = [
        value
        for value in program.methods[0].values
        if isinstance(value, plan.TensorSpec) and value.buffer
    ]
    assert stored
    for spec in stored:
        source = expected.program.constant_buffer if spec.is_constant else expected.mutable_data
        assert source is not None
        # Theirs runs on to the next tensor, padding included.
        assert program.tensor_data(spec) == source[spec.buffer].storage[: spec.nbytes]


def test_named_data() -> None:
    data = two_methods()
    expected = deserialize_pte_binary(data).named_data
    program = PteProgram.open(data)
    assert expected is not None
    assert set(program.named_data_keys) == set(expected.pte_data)
    for key, entry in expected.pte_data.items():
        assert program.named_data(key) == expected.buffers[entry.buffer_index]
    assert program.named_data("absent") is None


def test_a_path_is_mapped_and_nothing_is_copied(tmp_path) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(two_methods())
    for source in (path, str(path)):
        program = PteProgram.open(source)
        assert program.origin == str(path)
        views = [delegate.processed for method in program.methods for delegate in method.delegates]
        views += [program.named_data(key) for key in program.named_data_keys]
        assert views
        assert all(isinstance(view.obj, mmap.mmap) and view.readonly for view in views)


def test_bytes_are_viewed_in_place() -> None:
    data = two_methods()
    assert PteProgram.open(data).methods[0].delegates[0].processed.obj is data
    assert PteProgram.open(memoryview(data)).method_names == ("forward", "other")


def test_an_unknown_method_is_an_error() -> None:
    program = PteProgram.open(two_methods())
    with pytest.raises(ProgramError, match="got 'backward', expected 'forward' or 'other'"):
        program.method("backward")


def test_a_missing_file_is_an_error(tmp_path) -> None:
    with pytest.raises(ProgramError, match=r"cannot read the program: got .*absent\.pte"):
        PteProgram.open(tmp_path / "absent.pte")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an ExecuTorch program"),
        (b"PK\x03\x04" * 20, r"file identifier b'PK\\x03\\x04' in 80 bytes"),
        (b"\0\0\0\0BP08" + bytes(64), "not an ExecuTorch program"),
        (b"\0\0\0\0ET12eh00", "program is truncated"),
        (b"\xff\xff\xff\x7fET12", r"reference to bytes 2147483647\.\.2147483651"),
    ],
)
def test_bytes_of_no_program_are_refused(data: bytes, reason: str, tmp_path) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(data)
    for source in (data, path):
        with pytest.raises(BlobFormatError, match=reason):
            PteProgram.open(source)


def test_truncation_names_the_file_and_a_remedy(tmp_path) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(two_methods()[:-1])
    with pytest.raises(BlobFormatError, match=r"model\.pte: program is truncated.*copy the file"):
        PteProgram.open(path)


def test_segments_outside_the_file() -> None:
    data = bytearray(two_methods())
    # With the header's own length short of it, the size of all segments is unknown ...
    struct.pack_into("<I", data, 12, 24)
    # ... and the base may claim anything that leaves room for none of them.
    struct.pack_into("<Q", data, 24, len(data))
    with pytest.raises(BlobFormatError, match="segment lies outside the file"):
        PteProgram.open(data)
