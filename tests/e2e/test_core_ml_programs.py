"""Whole programs on the coreml engine, with the two stand-ins for Core ML in turn.

The strict one says whether the engine keeps to Core ML's interface, the other one runs the same
programs through this package's own replacement of it.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import core_ml
from support.checkpoints import CONFIG, tiny_model
from support.kept_and_flexible import Counting, counting_steps, lower_stateful
from support.lowering import PRECISIONS, fp32_specs, lower, lower_unchecked
from support.multimethod import IOS18, Layers, linear, lower_methods, specs, two
from support.stateful import CASES
from support.tolerances import ATOL_RTOL
from torch import nn

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.errors import BlobFormatError, InputError, UnsupportedOpError
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.export import export_methods
from coreml_delegate.llm.export import lower as lower_decoder
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.runtime import EngineOptions
from coreml_delegate.runtime.delegate import delegate_loader
from coreml_delegate.runtime.program.delegate_interface import DelegatePayload
from coreml_delegate.targets import ComputeUnit, Opset

pytestmark = pytest.mark.xdist_group("core ml programs")


@pytest.fixture(params=["strict", "executing"])
def _mac(request):
    with getattr(core_ml, request.param)():
        yield


on_a_mac = pytest.mark.usefixtures("_mac")


def _run(pte, *inputs, method="forward"):
    program = runtime.load_program(pte)
    actual = program.run(method, list(inputs))
    engines = {delegate.model.engine_name for delegate in program.delegates(method)}
    assert (program.host_name, engines) == ("python", {"coreml"})
    return actual


def _close(actual, expected, precision="fp32"):
    atol, rtol = ATOL_RTOL[precision]
    torch.testing.assert_close(actual, list(expected), atol=atol, rtol=rtol)


class Boundary(nn.Module):
    """Takes and returns types that Core ML's features do not have."""

    def forward(self, x, i, m):
        kept = torch.where(m, x, -x)
        return kept * 2, i * 3, m & (x > 0), kept.sum(), x.amax().to(torch.float64)


@functools.cache
def boundary(precision):
    specs = fp32_specs(compute_precision=precision)
    inputs = torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), torch.ones(2, 3) > 0
    return lower_unchecked(Boundary(), inputs, compile_specs=specs).pte


@on_a_mac
@pytest.mark.parametrize("precision", PRECISIONS)
def test_types_at_the_boundary(precision):
    x = torch.tensor([[0.5, -1.25, 2.0], [-0.75, 3.0, -4.0]])
    inputs = x, torch.tensor([1, -2, 1 << 20]), x.abs() > 1
    actual = _run(boundary(precision), *inputs)
    expected = Boundary()(*inputs)
    assert [a.dtype for a in actual] == [e.dtype for e in expected]
    _close(actual, expected)  # every value is one of fp16 too
    strided = x.T.contiguous().T, torch.stack([inputs[1]] * 2, 1)[:, 0], inputs[2]
    _close(_run(boundary(precision), *strided), expected)


class Half(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 2


@on_a_mac
def test_half_precision_inside_and_outside():
    x = torch.randn(4, 8).half()
    pte = lower(Half(), (x,), compile_specs=CoreMLBackend.generate_compile_specs()).pte
    (actual,) = _run(pte, x)
    assert actual.dtype == torch.float16
    _close([actual], [Half()(x)], "fp16")


class Parts(nn.Module):
    """Two delegates, and an operator between them that Core ML does not have."""

    def __init__(self):
        super().__init__()
        self.before, self.after = linear(4), linear(4, seed=1)

    def forward(self, x):
        first = self.before(x)
        return self.after(torch.asinh(first)), first


@on_a_mac
def test_several_delegates():
    lowered = lower(Parts(), (torch.zeros(3, 4),))
    assert "asinh" in str(lowered.operators)
    x = torch.randn(3, 4)
    program = runtime.load_program(lowered.pte)
    _close(program.run("forward", [x]), Parts()(x))
    assert len(program.delegates("forward")) == 2


@pytest.fixture(scope="module")
def methods():
    return two(Layers(linear()))


@on_a_mac
@pytest.mark.parametrize("strategy", ["POSITIONAL", "DISABLED"])
def test_methods_of_one_model(strategy, methods):
    lowered = _methods(strategy)
    for name, (module, inputs) in methods.items():
        _close(_run(lowered.pte, *inputs, method=name), [module(*inputs)])


@functools.cache
def _methods(strategy):
    return lower_methods(two(Layers(linear())), specs(strategy, **IOS18))


def test_methods_of_one_model_are_functions_of_one_package(methods):
    with core_ml.strict() as loaded:
        program = runtime.load_program(_methods("POSITIONAL").pte)
        for name, (_, inputs) in methods.items():
            program.run(name, list(inputs))
    assert len(set(loaded.paths)) == 1
    assert sorted(loaded.function_names) == ["decode", "prefill"]


STATES = ("attention by index_copy", "initial values of several", "scalar", "two partitions")


@functools.cache
def _stateful(name):
    case = CASES[name]
    specs = fp32_specs(compute_precision=Precision.FLOAT32)
    options = {"compile_specs": specs, "take_over_mutable_buffer": True}
    return lower(case.make(), case.inputs(0), **options).pte


@on_a_mac
@pytest.mark.parametrize("name", STATES)
def test_states(name):
    case = CASES[name]
    program, module = runtime.load_program(_stateful(name)), case.make().eval()
    for call in range(3):
        expected = module(*case.inputs(call))
        expected = expected if isinstance(expected, tuple) else (expected,)
        _close(program.run("forward", list(case.inputs(call))), expected, "fp16")


@on_a_mac
def test_states_go_to_other_engines_and_come_back():
    steps = counting_steps()
    programs = [runtime.load_program(_counting(), engine=e) for e in ("coreml", "openvino")]
    programs[0].run("forward", list(steps[0]))
    held = programs[0].snapshot_state()
    programs[1].restore_state(held)
    second = programs[1].run("forward", list(steps[1]))
    assert all(array.dtype == "float16" for array in held.values())
    programs[0].restore_state(held)
    _close(programs[0].run("forward", list(steps[1])), second, "fp16")
    programs[0].reset_state()
    _close(programs[0].run("forward", list(steps[0])), Counting()(*steps[0]), "fp16")


@functools.cache
def _counting():
    return lower_stateful(Counting())


def _tiny_decoder() -> Decoder:
    return Decoder(tiny_model("llama", max_position_embeddings=16), context=16)


@functools.cache
def _decoder():
    layout = Layout(CONFIG["vocab_size"], 16, 4, CacheKind.STATE)
    specs = fp32_specs(minimum_deployment_target=Opset.iOS18)
    partitioner = CoreMLPartitioner(compile_specs=specs, lower_full_graph=True)
    return lower_decoder(export_methods(_tiny_decoder(), layout), layout, partitioner).buffer


@on_a_mac
def test_a_language_model():
    tokens = [3, 14, 15, 9, 26, 5, 7]
    generator = Generator.load(_decoder(), engine="coreml")
    with torch.no_grad():
        expected = _tiny_decoder()(torch.tensor([tokens]))[0]
    for _ in range(2):
        generator.reset()
        actual = [generator.feed(tokens[:5]), generator.feed(tokens[5:6]), generator.feed([7])]
        _close([torch.stack(actual)], [expected[4:]], "fp16")


@functools.cache
def _enumerated():
    rows = torch.export.Dim("rows", min=1, max=4)
    exported = torch.export.export(
        Layers(linear()).eval(), (torch.randn(4, 4),), dynamic_shapes=({0: rows},)
    )
    listed = CoreMLBackend.generate_enumerated_shapes_compile_spec(
        exported, {"x": [[1, 4], [4, 4]]}
    )
    from executorch.exir import to_edge_transform_and_lower

    partitioner = CoreMLPartitioner(compile_specs=[*fp32_specs(**IOS18), listed])
    return to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch().buffer


@on_a_mac
def test_enumerated_shapes():
    model = Layers(linear()).eval()
    program = runtime.load_program(_enumerated())
    for count in (4, 1, 4):
        x = torch.randn(count, 4)
        _close(program.run("forward", [x]), [model(x)])
    with pytest.raises(InputError, match="not enumerated"):
        program.run("forward", [torch.randn(2, 4)])


# The compute unit


@functools.cache
def _on_the_neural_engine():
    specs = fp32_specs(compute_unit=ComputeUnit.CPU_AND_NE)
    return lower(Half(), (torch.zeros(3),), compile_specs=specs).pte


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, "CPU_AND_NE"),
        (EngineOptions(threads=1), "CPU_AND_NE"),
        (EngineOptions(compute_unit=ComputeUnit.CPU_ONLY), "CPU_ONLY"),
    ],
)
def test_the_compute_unit_is_that_of_the_export_or_of_the_options(options, expected):
    with core_ml.strict() as loaded:
        runtime.load_program(_on_the_neural_engine(), options=options).load_method()
    assert loaded.compute_units == [expected]


def test_a_compute_unit_that_core_ml_does_not_know_is_refused():
    program = runtime.load_program(_on_the_neural_engine()).program
    (info,) = program.method("forward").delegates
    payload = DelegatePayload(
        info.backend_id, info.processed, (("compute_units", b"ane"),), "forward", lambda _: None
    )
    delegate_loader("auto")(payload)  # which no engine but Core ML reads
    with core_ml.strict(), pytest.raises(BlobFormatError, match=r"compute_units='ane', expected"):
        delegate_loader("auto")(payload)


# Calls of several threads, and what Core ML does not tell


@on_a_mac
def test_calls_of_several_threads():
    pte = _methods("DISABLED").pte
    program = runtime.load_program(pte)
    inputs = [torch.randn(3, 4) for _ in range(16)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: program.run("prefill", [x]), inputs))
    for x, result in zip(inputs, results, strict=True):
        _close(result, [Layers(linear()).eval()(x)])


@on_a_mac
def test_times_of_delegates_are_logged_and_values_refused(tmp_path):
    x = torch.randn(3, 4)
    pte = _methods("DISABLED").pte
    timed = runtime.load_program(pte, enable_etdump=True)
    timed.run("prefill", [x])
    timed.write_etdump_result_to_file(tmp_path / "etdump")
    assert (tmp_path / "etdump").stat().st_size
    valued = runtime.load_program(pte, enable_etdump=True, debug_buffer_size=1 << 20)
    with pytest.raises(UnsupportedOpError, match="not the values inside"):
        valued.run("prefill", [x])
