"""The oldest target of a program against lowering the model for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import handmade
from support.lowering import Function, fp32_specs, lower
from support.mil import Opset, build, builder_program, ct, mb, serialized, types

from coreml_delegate.device_check.deployment import demands_of
from coreml_delegate.runtime.delegate import read_blob
from coreml_delegate.runtime.mil.program import Program
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.delegates import all_partitions

X = {"x": np.zeros((2, 8), np.float32)}
IMAGE = {"x": np.zeros((1, 4, 8, 8), np.float32)}


def oldest_opset(program):
    """Return the oldest opset that can express a program."""
    return max((demand.opset for demand in demands_of(program)), default=min(Opset))


def compiled(pte: bytes) -> Program:
    (partition,) = all_partitions(PteProgram.open(pte))
    program, _ = read_blob(partition.blob)
    return program


MODULES = {
    "elementwise": (Function(lambda x: torch.relu(x) * 2 + torch.sigmoid(x)), (2, 8)),
    "layers": (torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.GELU()), (1, 4, 8, 8)),
    "rows": (Function(lambda x: x[:, torch.tensor([2, 0, 5])].softmax(-1)), (2, 8)),
    "norm": (torch.nn.LayerNorm(8), (2, 8)),
    "unshuffle": (torch.nn.PixelUnshuffle(2), (1, 4, 8, 8)),
    "topk": (Function(lambda x: x.topk(3)[0]), (2, 8)),
}


@pytest.mark.share(3)
@pytest.mark.parametrize("name", MODULES)
def test_lowering_for_the_target_that_is_found(name):
    """The partitioner finds the oldest target by converting for each."""
    module, shape = MODULES[name]
    newest = lower(
        module,
        (torch.randn(shape),),
        compile_specs=fp32_specs(minimum_deployment_target=ct.target.iOS18),
    )
    found = oldest_opset(compiled(newest.pte))
    (partition,) = lower(module, (torch.randn(shape),)).report.partitions
    assert found.name == partition.target
    for_it = lower(
        module,
        (torch.randn(shape),),
        compile_specs=fp32_specs(minimum_deployment_target=ct.target[found.name]),
    )
    assert for_it.report.coverage == 1
    assert compiled(for_it.pte).specification_version == found


@pytest.mark.parametrize("opset", [o for o in Opset if o <= Opset.iOS18], ids=lambda o: o.name)
def test_a_plain_program_demands_nothing(opset):
    assert demands_of(build(lambda x: mb.relu(x=x), X, opset)) == []


def unshuffled(x):
    return mb.pixel_unshuffle(x=x, downscale_factor=np.uint32(2))


@pytest.mark.parametrize(
    ("what", "function", "inputs", "needs"),
    [
        (
            "pixel_unshuffle",
            lambda x: mb.pixel_unshuffle(x=x, downscale_factor=np.uint32(2)),
            IMAGE,
            16,
        ),
        (
            "reshape_like",
            lambda x: mb.reshape_like(
                x=x, ref_tensors=(x, x), begins=(0, 1), ends=(1, 2), end_masks=(False, False)
            ),
            X,
            16,
        ),
        ("cast", lambda x: mb.cast(x=mb.cast(x=x, dtype="int16"), dtype="fp32"), X, 17),
        ("topk", lambda x: mb.topk(x=x, k=2, axis=-1, output_indices_dtype="uint16")[0], X, 17),
        (
            "scaled_dot_product_attention",
            lambda x: mb.scaled_dot_product_attention(query=x, key=x, value=x),
            {"x": np.zeros((1, 2, 4, 8), np.float32)},
            18,
        ),
        ("inputs and outputs in fp16", lambda x: mb.relu(x=x), {"x": np.zeros(4, np.float16)}, 16),
    ],
)
def test_what_is_demanded(what, function, inputs, needs):
    program = build(function, inputs, Opset.iOS18)
    assert what in [demand.what for demand in demands_of(program)]
    assert oldest_opset(program).name == f"iOS{needs}"
    # The program as it is cannot be built for an older one.
    if what != "inputs and outputs in fp16":
        older = max(opset for opset in Opset if opset < oldest_opset(program))
        with pytest.raises((ValueError, NotImplementedError, AttributeError, KeyError)):
            builder_program(function, inputs, older)


def test_defaults_of_newer_parameters_demand_nothing():
    """``gather`` has ``validate_indices`` since iOS17; off is how the older ones behave."""

    def rows(x, *, validate):
        return mb.gather(x=x, indices=np.int32([0, 1]), axis=0, validate_indices=validate)

    plain = build(lambda x: rows(x, validate=False), X, Opset.iOS18)
    checked = build(lambda x: rows(x, validate=True), X, Opset.iOS18)
    assert oldest_opset(plain) is Opset.iOS15
    assert oldest_opset(checked) is Opset.iOS17


def test_weights_that_are_variables_demand_an_opset():
    """The weight of a convolution is a constant before iOS17."""

    def function(x, w):
        return mb.conv(x=x, weight=w)

    inputs = {"x": np.zeros((1, 4, 8, 8), np.float32), "w": np.zeros((4, 4, 3, 3), np.float32)}
    program = build(function, inputs, Opset.iOS18)
    fixed = build(lambda x: mb.conv(x=x, weight=inputs["w"]), IMAGE, Opset.iOS18)
    assert (oldest_opset(fixed), oldest_opset(program)) == (Opset.iOS15, variable_weights())


def variable_weights() -> Opset:
    """The first opset whose convolution takes a variable, by building one."""
    inputs = {"x": np.zeros((1, 4, 8, 8), np.float32), "w": np.zeros((4, 4, 3, 3), np.float32)}
    for opset in (Opset.iOS15, Opset.iOS16, Opset.iOS17):
        try:
            builder_program(lambda x, w: mb.conv(x=x, weight=w), inputs, opset)
        except ValueError:
            continue
        return opset
    return Opset.iOS18


def test_states_and_functions():
    specs = [mb.TensorSpec((3,), dtype=types.fp32), mb.StateTensorSpec((3,), dtype=types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def stateful(x, total):
        return mb.add(x=x, y=mb.cast(x=mb.read_state(input=total), dtype="fp32"))

    program = serialized(stateful, Opset.iOS18)
    assert oldest_opset(program) is Opset.iOS18
    assert "states" in [demand.what for demand in demands_of(program)]
    plain = build(lambda x: mb.relu(x=x), X, Opset.iOS18)
    (function,) = plain.functions.values()
    several = Program(plain.specification_version, {"a": function, "b": function}, "a", {})
    assert [demand.what for demand in demands_of(several)] == ["several functions"]


def test_an_op_that_is_not_known_demands_what_the_program_has():
    function = handmade.function([handmade.op("novel", "y", x="x")], ["y"], opset="CoreML7")
    program = Program(Opset.iOS17, {"main": function}, "main", {})
    assert [(d.what, d.opset) for d in demands_of(program)] == [("novel", Opset.iOS17)]
