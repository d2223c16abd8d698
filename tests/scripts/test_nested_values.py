"""The commands on models whose inputs and results are nested, named by their paths."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from executorch.exir._serialize._program import deserialize_pte_binary
from support.cli_models import stepping
from support.command import MODELS
from support.tolerances import ATOL_RTOL

from coreml_delegate.exported.value_names import read_inputs, read_outputs
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.runtime.program.signature import input_names, output_names
from coreml_delegate.runtime.recording import Call, Recording
from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("cli")

STEPPING = f"{MODELS}:stepping"
INPUTS = {
    "step.past.first": (2, 4),
    "step.past.others[0]": (2,),
    "step.weights['a b'][0]": (4,),
    "rest_0": (2, 4),
    "rest_1": (2, 4),
    "scale": None,
    "bias": (4,),
}
OUTPUTS = [
    "mutated_input_step.past.first",
    "past.first",
    "past.others[0]",
    "weights.file.values",
    "weights.file.indices",
    "weights['a b']",
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("stepping") / "a.pte"
    options = ["--precision", "float32", "--etrecord", f"{path}.etrecord", "--bundle", "2"]
    assert main(["export", STEPPING, "-o", str(path), *options]) == 0
    return path


@pytest.fixture(autouse=True)
def folder(exported, tmp_path, monkeypatch):
    """The current folder, with what was exported."""
    monkeypatch.chdir(tmp_path)
    for path in exported.parent.iterdir():
        Path(path.name).write_bytes(path.read_bytes())


def read(capsys):
    return json.loads(capsys.readouterr().out)


def test_a_program_has_the_names():
    (method,) = PteProgram.open("a.pte").methods
    assert input_names(method) == tuple(INPUTS)
    assert output_names(method) == tuple(OUTPUTS)


def test_executorch_reads_the_nesting_as_torch_wrote_it():
    """Other tools find containers that torch knows without this package."""
    (plan,) = deserialize_pte_binary(Path("a.pte").read_bytes()).program.execution_plan
    load = torch.utils._pytree.treespec_loads
    taken = load(plan.container_meta_type.encoded_inp_str)
    returned = load(plan.container_meta_type.encoded_out_str)
    args, kwargs = torch.utils._pytree.tree_unflatten(list(INPUTS), taken)
    assert args == ()
    assert kwargs["step"]["past"] == {
        "first": "step.past.first",
        "others": ("step.past.others[0]",),
    }
    results = torch.utils._pytree.tree_unflatten(OUTPUTS[1:], returned)
    assert results["weights"]["a b"] == "weights['a b']"


@pytest.mark.parametrize("host", ["python", "stock"])
def test_run_takes_and_writes_arrays_by_name(host, capsys):
    torch.manual_seed(3)
    module, (step, *rest), keywords = stepping()
    leaves = [
        step.past.first,
        step.past.others[0],
        step.weights["a b"][0],
        *rest,
        keywords["bias"],
    ]
    names = [name for name, shape in INPUTS.items() if shape is not None]
    arrays = {name: leaf.numpy().copy() for name, leaf in zip(names, leaves, strict=True)}
    np.savez("in.npz", **dict(sorted(arrays.items())))
    torch.manual_seed(0)
    module = stepping()[0].eval()  # of the same weights as the program
    with torch.no_grad():
        result = module(step, *rest, **keywords)
    expected = [
        step.past.first,
        result.past.first,
        result.past.others[0],
        *result.weights["file"],
        result.weights["a b"],
    ]
    options = ["--host", host, "--repeat", "1", "--input", "in.npz", "-o", "out.npz", "--json"]
    assert main(["run", "a.pte", *options]) == 0
    assert [each["name"] for each in read(capsys)["outputs"]] == OUTPUTS
    atol, rtol = ATOL_RTOL["fp32"]
    with np.load("out.npz") as archive:
        assert archive.files == OUTPUTS
        for name, want in zip(OUTPUTS, expected, strict=True):
            np.testing.assert_allclose(archive[name], want.numpy(), atol=atol, rtol=rtol)


def test_an_archive_with_a_wrong_name_is_refused(capsys):
    np.savez("in.npz", rest_0=np.zeros((2, 4), np.float32), rest_2=np.zeros((2, 4), np.float32))
    assert main(["run", "a.pte", "--input", "in.npz"]) == 1
    assert (
        "in.npz names inputs that the program does not have, or that are given already: got rest_2"
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["verify", STEPPING, "a.pte"],
        ["verify", STEPPING, "a.pte", "--host", "stock"],
        ["verify", STEPPING, "a.pte", "--etrecord", "a.pte.etrecord"],
        ["verify", "a.bpte"],
        ["verify", "a.pte", "--engine", "openvino", "--against", "reference"],
    ],
    ids=lambda command: " ".join(command[1:]),
)
def test_verify(command, capsys):
    assert main([*command, "--json"]) == 0
    assert list(read(capsys)["outputs"]) == OUTPUTS


def test_record_and_replay(capsys):
    assert main(["record", "a.pte", "-o", "a.cmlrun", "--samples", "1"]) == 0
    capsys.readouterr()
    assert main(["replay", "a.cmlrun", "a.pte", "--json"]) == 0
    assert list(read(capsys)["outputs"]) == OUTPUTS


def test_recordings_with_numbers_for_names_are_replayed(capsys):
    """Releases before programs had names wrote numbers."""
    assert main(["record", "a.pte", "-o", "a.cmlrun", "--samples", "1"]) == 0
    new = Recording.read(Path("a.cmlrun"))
    (call,) = new.calls
    numbers = ["mutated_input_0", *(f"output_{n}" for n in range(5))]
    outputs = dict(zip(numbers, call.outputs.values(), strict=True))
    fields = {name: getattr(new, name) for name in Recording.__slots__}
    old = Recording(**fields | {"calls": (Call(call.method, call.inputs, outputs),)})
    with Path("old.cmlrun").open("wb") as file:
        old.write(file)
    capsys.readouterr()
    assert main(["replay", "old.cmlrun", "a.pte", "--json"]) == 0
    assert list(read(capsys)["outputs"]) == OUTPUTS


@pytest.mark.parametrize("command", ["trace", "check", "profile"])
def test_other_commands_run(command, capsys):
    assert main([command, "a.pte", "--json"]) == 0
    assert read(capsys)


def test_inspect(capsys):
    assert main(["inspect", "a.pte", "--json"]) == 0
    (method,) = read(capsys)["methods"]
    assert {v["name"]: v.get("shape") and tuple(v["shape"]) for v in method["inputs"]} == INPUTS
    assert [value["name"] for value in method["outputs"]] == OUTPUTS
    assert main(["inspect", "a.pte"]) == 0
    assert "step.past.others[0] float32[2], step.weights['a b'][0] " in capsys.readouterr().out


def test_dynamic_dimensions_of_members(capsys):
    sizes = ["--dynamic", "step.past.others[0]:0=1..9"]
    assert main(["export", STEPPING, "-o", "b.pte", "--precision", "float32", *sizes]) == 0
    (method,) = PteProgram.open("b.pte").methods
    assert method.input_specs[1].shape == (9,)


def test_enumerated_shapes_of_members(capsys):
    sizes = ["--enumerated-shapes", "step.past.others[0]=1/2"]
    assert main(["export", STEPPING, "-o", "b.pte", "--precision", "float32", *sizes]) == 0
    assert "takes step_past_others_0 [1] | [2]" in capsys.readouterr().out
    assert main(["verify", STEPPING, "b.pte"]) == 0


@pytest.mark.slow
def test_the_cache_of_a_transformers_model(capsys):
    source = f"{MODELS}:decoder_with_cache"
    assert main(["export", source, "-o", "b.pte", "--precision", "float32"]) == 0
    capsys.readouterr()
    assert main(["verify", source, "b.pte", "--min-sqnr", "80", "--json"]) == 0
    assert list(read(capsys)["outputs"]) == [
        "logits",
        "cache.key_cache[0]",
        "cache.value_cache[0]",
    ]


def nesting(value):
    return torch.utils._pytree.treespec_dumps(torch.utils._pytree.tree_structure(value))


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (1, ["output_0"]),
        ((1, [2, 3]), ["output_0", "output_1[0]", "output_1[1]"]),
        ({"a": 1, "b": {"a b": 2, "c": 3}}, ["a", "b['a b']", "b.c"]),
        ({"x.y": 1, 4: 2}, ["['x.y']", "output_4"]),
        ([{"a": 1}], ["output_0.a"]),
        ({"a": (), "b": None}, ["b"]),
    ],
)
def test_names_of_results(value, names):
    assert read_outputs(nesting(value), len(names)) == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "null",
        "[2, {}]",
        "[1, {}]",
        "[1, 2]",
        nesting((1, 2, 3)),
        nesting({"output_0": 1, 0: 2}),
        '[1, {"type": "a", "context": "{", "children_spec": [1]}]',
        "[1, " + '{"type": "builtins.list", "context": null, "children_spec": [' * 9999,
        "[" * 99999,
    ],
    ids=range(11),
)
def test_files_without_names_get_numbers(text):
    assert read_outputs(text, 2) is None
    assert read_inputs(text, 2) in (None, ["0", "1"])


def test_positional_inputs_of_other_exporters_are_numbered():
    assert read_inputs(nesting(((1, {"a": 2}), {"mask": 3})), 3) == ["0", "1", "mask"]
