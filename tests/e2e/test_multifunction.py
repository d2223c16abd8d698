"""Several methods: what they compute, what is stored once, and what cannot be."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from support.failing_conversions import counted
from support.gates import needs_compiler
from support.multimethod import (
    IOS18,
    Accumulator,
    Layers,
    exported,
    linear,
    lower_methods,
    rows,
    specs,
    two,
)
from support.tolerances import ATOL_RTOL
from torch import nn

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.formats.files import write_folder
from coreml_delegate.formats.mlpackage import locate
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.runtime.delegate import blob_files, read_blob
from coreml_delegate.scripts.cli import main
from coreml_delegate.targets import Opset

ATOL, RTOL = ATOL_RTOL["fp32"]
WIDTH = 1024
WEIGHT = WIDTH * WIDTH * 4  # bytes
# On one worker, so that its fixtures are lowered once.
pytestmark = pytest.mark.xdist_group("multifunction")
HOSTS = ["python", pytest.param("stock", marks=needs_compiler)]


def assert_equal_eager(pte, methods, host="python", engine="openvino"):
    program = runtime.load_program(pte, host=host, engine=engine)
    for name, (module, inputs) in methods.items():
        (actual,) = program.run(name, list(inputs))
        torch.testing.assert_close(actual, module(*inputs), atol=ATOL, rtol=RTOL)


@pytest.fixture(scope="module")
def large():
    return two(Layers(linear(WIDTH)), WIDTH)


@pytest.fixture(scope="module")
def shared(large):
    return lower_methods(large, specs("POSITIONAL", **IOS18))


@pytest.fixture(scope="module")
def apart(large):
    return lower_methods(large, specs("DISABLED", **IOS18))


@pytest.mark.parametrize("engine", ["openvino", "reference"])
@pytest.mark.parametrize("host", HOSTS)
def test_shared_models_compute_what_eager_does(shared, large, host, engine):
    assert_equal_eager(shared.pte, large, host, engine)


def test_weights_are_stored_once(shared, apart):
    assert WEIGHT < len(shared.pte) < 1.01 * WEIGHT
    assert 2 * WEIGHT < len(apart.pte) < 2.02 * WEIGHT
    assert apart.not_shared("prefill") == ["strategy DISABLED was asked for"]
    assert shared.shared_by("prefill") == [("decode", "prefill")]


def test_delegates_refer_to_one_blob(shared):
    (decode,) = shared.references("decode")
    (prefill,) = shared.references("prefill")
    assert decode.key == prefill.key
    assert (decode.function_name, prefill.function_name) == ("decode", "prefill")
    program = shared.program
    assert program.named_data_keys == (decode.key,)
    model, metadata = read_blob(program.named_data(decode.key))
    # A digest of the debug info follows.
    assert decode.key.startswith(f"{metadata.identifier}_")
    assert metadata.methods.keys() == set(model.functions) == {"decode", "prefill"}
    for name, function in model.functions.items():
        names = metadata.method(name)
        assert names.input_names == tuple(f.name for f in function.inputs)
        assert names.output_names == tuple(f.name for f in function.outputs)
    assert model.functions["decode"].inputs[0].type.shape == (1, WIDTH)
    assert model.functions["prefill"].inputs[0].type.shape == (3, WIDTH)


@pytest.fixture(scope="module")
def theirs(apart, tmp_path_factory):
    """The multifunction model that coremltools makes of the models by themselves."""
    folder = tmp_path_factory.mktemp("packages")
    ct = coremltools()
    descriptor = ct.utils.MultiFunctionDescriptor()
    for method in apart.program.methods:
        files, _ = blob_files(method.delegates[0].processed)
        write_folder(files, folder / f"{method.name}.mlpackage")
        descriptor.add_function(str(folder / f"{method.name}.mlpackage"), "main", method.name)
    descriptor.default_function_name = "decode"
    ct.utils.save_multifunction(descriptor, str(folder / "both.mlpackage"))
    return folder / "both.mlpackage"


def test_the_model_is_what_coremltools_makes(shared, theirs, tmp_path):
    files, _ = blob_files(shared.program.named_data(shared.program.named_data_keys[0]))
    ours = tmp_path / "ours.mlpackage"
    write_folder(files, ours)
    ct = coremltools()
    our_spec, their_spec = (ct.models.utils.load_spec(str(path)) for path in (ours, theirs))
    our_spec.description.ClearField("metadata")  # which theirs has lost
    assert our_spec.description == their_spec.description
    assert our_spec.specificationVersion == their_spec.specificationVersion
    for name, function in their_spec.mlProgram.functions.items():
        assert our_spec.mlProgram.functions[name].inputs == function.inputs
        assert our_spec.mlProgram.functions[name].opset == function.opset
    weights = theirs / "Data/com.apple.CoreML/weights/weight.bin"
    assert len(locate(files).weights["weights/weight.bin"]) == pytest.approx(
        weights.stat().st_size, abs=64
    )
    (x,) = rows(3, WIDTH, seed=1)
    ran = [
        runtime.load_mlpackage(path, function_name="prefill", engine="reference").predict(
            {"x": x.numpy()}
        )
        for path in (ours, theirs)
    ]
    for (_, mine), (_, other) in zip(*(sorted(each.items()) for each in ran), strict=True):
        torch.testing.assert_close(mine, other, atol=0, rtol=0)


def test_equal_methods_are_converted_once(monkeypatch):
    counts = counted(monkeypatch)
    lowered = lower_methods(two(count=1), specs(**IOS18))
    assert counts["mlprogram"] == 1
    assert lowered.shared_by("decode") == lowered.shared_by("prefill") == [("decode", "prefill")]
    assert lowered.not_shared("decode") == lowered.not_shared("prefill") == [""]
    assert_equal_eager(lowered.pte, two(count=1))


def test_equal_graphs_with_other_weights_are_told_apart(monkeypatch):
    counts = counted(monkeypatch)
    inputs = rows(2, 4)
    methods = {"one": (Layers(linear()), inputs), "other": (Layers(linear(seed=1)), inputs)}
    lowered = lower_methods(methods, specs(**IOS18))
    assert counts["mlprogram"] == 2
    assert lowered.not_shared("one") == lowered.not_shared("other") != [""]
    assert_equal_eager(lowered.pte, methods)


def test_each_position_is_a_model(monkeypatch):
    methods = two(Layers(linear(), linear(seed=1), split=True))
    lowered = lower_methods(methods, specs("POSITIONAL"))
    assert len(lowered.program.named_data_keys) == 2
    assert [r.key for r in lowered.references("decode")] == [
        r.key for r in lowered.references("prefill")
    ]
    assert_equal_eager(lowered.pte, methods)


class Durations(nn.Module):
    """How long tokens last: a recurrent layer, an op without a translation, and a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 8)
        self.lstm = nn.LSTM(8, 4, batch_first=True, bidirectional=True)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens):
        states, _ = self.lstm(self.table(tokens))
        return self.out(torch.asinh(states)).sigmoid().sum(-1)


@pytest.mark.share(2)
@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize("host", HOSTS)
def test_methods_in_several_partitions(host):
    module = Durations().eval()
    methods = {f"forward_{n}": (module, (torch.arange(n)[None] % 16,)) for n in (8, 16, 32)}
    lowered = lower_methods(methods, specs())
    assert {len(report.partitions) for report in lowered.reports.values()} == {2}
    assert_equal_eager(lowered.pte, methods, host)


def test_without_a_target_positional_demands_one(monkeypatch):
    methods = two()
    counts = counted(monkeypatch)
    lowered = lower_methods(methods, specs("POSITIONAL"))
    assert counts["mlprogram"] == 2
    (partition,) = lowered.reports["decode"].partitions
    assert partition.target == "iOS18"
    assert partition.demanded_by == ("weights shared by strategy POSITIONAL",)
    assert "one model for decode, prefill" in str(lowered.reports["decode"])
    assert "one model for decode, prefill" in lowered.reports["decode"].to_html()
    assert partition.shared_by == ("decode", "prefill")
    (delegate,) = lowered.program.method("decode").delegates
    assert CompileOptions.from_pairs(delegate.compile_specs).deployment_target is Opset.iOS18


def test_without_a_strategy_no_target_is_demanded(caplog):
    methods = two()
    with caplog.at_level(logging.INFO, "coreml_delegate.lowering.multifunction"):
        lowered = lower_methods(methods, specs())
    reason = (
        "weights in common can be shared from iOS18 on, and this is lowered for iOS15; see "
        "minimum_deployment_target"
    )
    for method in methods:
        assert lowered.references(method) == [None]
        assert lowered.not_shared(method) == [reason]
        assert lowered.shared_by(method) == [()]
        text = f"shares no weights with other methods: {reason}"
        assert text in str(lowered.reports[method])
        assert text in lowered.reports[method].to_html()
        assert f"partition 0 of {method!r} is a model by itself: {reason}" in caplog.messages
    document = json.loads(lowered.reports["decode"].to_json())
    assert document["partitions"][0]["not_shared"] == reason
    assert_equal_eager(lowered.pte, methods)


def test_methods_without_common_weights_stay_apart():
    one, other = linear(), linear(seed=1)
    methods = {
        "encode": (Layers(other), rows(2, 4)),
        "decode": (Layers(one), rows(1, 4)),
        "prefill": (Layers(one), rows(3, 4)),
        "score": (Layers(one, other, split=True), rows(1, 4)),
    }
    lowered = lower_methods(methods, specs(**IOS18))
    assert lowered.shared_by("decode") == lowered.shared_by("prefill") == [("decode", "prefill")]
    assert lowered.not_shared("encode") == ["no other method has a weight in common with it here"]
    assert lowered.not_shared("score") == 2 * [
        "no other method has as many partitions ('encode' 1, 'decode' 1, 'prefill' 1)"
    ]
    assert_equal_eager(lowered.pte, methods)


def test_what_one_method_shares_with_each_of_two_joins_all():
    one, other = linear(), linear(seed=1)
    methods = {
        "first": (Layers(one), rows(1, 4)),
        "second": (Layers(other), rows(1, 4)),
        "both": (Layers(one, other), rows(1, 4)),
    }
    lowered = lower_methods(methods, specs(**IOS18))
    assert lowered.shared_by("second") == [("first", "second", "both")]
    assert_equal_eager(lowered.pte, methods)


def two_counters():
    layer = linear()
    return {
        "count": (Accumulator(layer, "here"), rows(2, 4)),
        "sum": (Accumulator(layer, "there"), rows(3, 4)),
    }


@pytest.fixture(scope="module")
def counters():
    # The states demand iOS18, which is all that sharing needs.
    return lower_methods(two_counters(), specs())


@pytest.mark.parametrize("host", HOSTS)
def test_states_of_different_buffers_stay_apart(counters, host):
    assert counters.shared_by("sum") == [("count", "sum")]
    assert_runs_equal_eager(counters.pte, two_counters(), host, "fp16")


@pytest.fixture(scope="module")
def left_to_executorch():
    """The error about a buffer of several methods advises this."""
    partitioner = CoreMLPartitioner(
        compile_specs=specs("POSITIONAL"), take_over_mutable_buffer=False
    )
    programs = exported(two(Accumulator(linear())))
    edge = to_edge_transform_and_lower(programs, partitioner=[partitioner])
    memory = MemoryPlanningPass(share_mutable_buffers=True)
    return edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=memory)).buffer


@pytest.mark.parametrize("host", HOSTS)
def test_methods_share_buffers_that_executorch_keeps(left_to_executorch, host):
    assert_runs_equal_eager(left_to_executorch, two(Accumulator(linear())), host, "fp32")


def assert_runs_equal_eager(pte, methods, host, precision):
    """That calls in turn see what those before them have written, or do not."""
    program = runtime.load_program(pte, host=host)
    atol, rtol = ATOL_RTOL[precision]  # Core ML states are fp16, whatever the model computes in
    first, second = methods
    for name in (first, second, first):
        module, inputs = methods[name]
        (actual,) = program.run(name, list(inputs))
        torch.testing.assert_close(
            actual, module.requires_grad_(False)(*inputs), atol=atol, rtol=rtol
        )


def test_method_names_that_mil_has_not():
    module = Layers(linear())
    methods = {"a step": (module, rows(1, 4)), "all-at-once": (module, rows(3, 4))}
    lowered = lower_methods(methods, specs("POSITIONAL"))
    (reference,) = lowered.references("all-at-once")
    assert reference.function_name == "function_1"
    assert_equal_eager(lowered.pte, methods)


def test_quantized_weights_are_stored_once(large):
    config = {"mode": "linear_symmetric", "dtype": "int8"}
    options = {"op_linear_quantizer_config": config, **IOS18}
    together = lower_methods(large, specs("POSITIONAL", **options))
    assert WEIGHT / 4 < len(together.pte) < 1.05 * WEIGHT / 4
    apart = lower_methods(large, specs("DISABLED", **options))
    ran = [runtime.load_program(each.pte) for each in (together, apart)]
    for name, (_, inputs) in large.items():
        (mine,), (other,) = (program.run(name, list(inputs)) for program in ran)
        torch.testing.assert_close(mine, other, atol=0, rtol=0)


def test_blobs_tell_neither_day_nor_machine(shared):
    """Else equal models would have other bytes tomorrow, and be compiled anew on the device."""
    files, _ = blob_files(shared.program.named_data(shared.program.named_data_keys[0]))
    spec = coremltools().proto.Model_pb2.Model.FromString(bytes(locate(files).spec))
    notes = spec.description.metadata.userDefined
    assert [key.rpartition(".")[2] for key in sorted(notes)] == [
        "source",
        "source_dialect",
        "version",
    ]
    assert (
        notes["com.github.apple.coremltools.source"]
        == f"torch=={torch.__version__.partition('+')[0]}"
    )


def test_the_commands_show_and_extract_them(shared, large, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared.pte").write_bytes(shared.pte)
    assert main(["inspect", "shared.pte", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    (delegate,) = summary["methods"][1]["delegates"]
    assert delegate["function"] == "prefill"
    assert summary["named_data"] == [delegate["shared_as"]]
    assert delegate["options"]["weight_sharing"] == "positional"
    assert [f["name"] for f in delegate["model"]["functions"]] == ["decode", "prefill"]
    assert delegate["model"]["weights"]["count"] == 2
    assert main(["extract", "shared.pte", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["delegates"] == ["decode_0 (function decode)", "prefill_0 (function prefill)"]
    model = runtime.load_mlpackage(entry["path"], function_name="prefill")
    module, (x,) = large["prefill"]
    (result,) = model.predict({"x": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(result), module(x), atol=ATOL, rtol=RTOL)
    assert main(["run", "shared.pte", "--method", "prefill", "--repeat", "1"]) == 0
