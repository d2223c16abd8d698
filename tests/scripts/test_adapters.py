"""``export-llm --adapter`` and ``generate --adapter``: files, output and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.adapters import matrices, merged, save_adapter
from support.checkpoints import save
from support.command import leftovers
from support.tolerances import logits_bounds

from coreml_delegate.llm.generator import Generator
from coreml_delegate.scripts.cli import main
from coreml_delegate.scripts.summary import summarize_pte

pytestmark = pytest.mark.xdist_group("checkpoints")
CHANGED = ("q_proj", "fc2")


@pytest.fixture(scope="module", autouse=True)
def _torchao():
    # It is logged about while it is imported, which is no output of the command.
    import torchao.quantization  # noqa: F401


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Of the kind that has the fewest operations."""
    folder = tmp_path_factory.mktemp("model")
    return save(folder, "phi", vocab_size=256, num_hidden_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    """A checkpoint and an adapter, ``french``."""
    folder = tmp_path_factory.mktemp("adapters")
    model.save_pretrained(folder / "base")
    save_adapter(folder / "french", model, matrices(model, CHANGED))
    return folder


def export(folder: Path, *options: str) -> int:
    command = ["export-llm", str(folder / "base"), "-o", str(folder / "model.pte"), *options]
    return main([*command, "--prefill-chunk", "4", "--precision", "float32"])


@pytest.fixture(scope="module")
def report(folder):
    """What the command says of the file that it writes."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("coreml_delegate.scripts.console.write", lines.append)
        assert export(folder, "--adapter", str(folder / "french")) == 0
    return "\n".join(lines)


@pytest.fixture
def program(folder, report):
    return folder / "model.pte"


def test_the_report_lists_the_adapters(report):
    assert "adapter french  rank 4 in 2 modules, 2.3 kB" in report
    assert "forward_french  " in report


@torch.no_grad()
def test_text_and_logits_are_those_of_merged_weights(program, model, capsys):
    changed = merged(model, matrices(model, CHANGED), 2.0)
    tokens = [1, *b"ab"]  # behind the token that begins a text
    for _ in range(6):
        logits = changed(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    options = ["--adapter", "french", "--max-new-tokens", "6", "--engine", "openvino", "--json"]
    assert generate(program, *options) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == tokens[3:]
    atol, rtol = logits_bounds(logits)
    actual = Generator.load(program, adapter="french", engine="openvino").feed(tokens[:-1])
    torch.testing.assert_close(actual, logits, atol=atol, rtol=rtol)
    base = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, -1]
    assert (actual - base).abs().max() > 0.1 * base.abs().max()


def test_all_methods_are_functions_of_one_model(program, model, capsys):
    delegates = [d for m in summarize_pte(program)["methods"] for d in m["delegates"]]
    assert len({delegate["shared_as"] for delegate in delegates}) == 1
    functions = ["forward", "forward_french"]
    assert sorted(delegate["function"] for delegate in delegates) == functions
    matrices_ = [t for t in delegates[0]["model"]["weights"]["tensors"] if len(t["shape"]) == 2]
    shapes = [tuple(t["shape"]) for t in matrices_]
    stored = [tuple(p.shape) for p in model.parameters() if p.dim() == 2]
    branches = [(4, 32), (32, 4), (4, 48), (32, 4)]
    tables = [(64, 4), (64, 4)]  # of rotations
    assert sorted(shapes) == sorted(stored + branches + tables)
    assert main(["inspect", str(program)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("model: see method forward\n") == 1
    assert shown.count("specification version") == 1
    assert "output_0 'french'" in shown


def generate(program: Path, *options: str) -> int:
    return main(["generate", str(program), "--prompt", "ab", *options])


def test_an_unknown_adapter_is_refused(program, capsys):
    assert generate(program, "--adapter", "frensh") == 1
    message = "the program has no such adapter: got frensh, expected perhaps french\n"
    assert capsys.readouterr().err == f"coreml-delegate: error: {message}"


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (["nowhere"], "nowhere is not an adapter that peft has saved"),
        (["{}/french", "{}/french"], "two adapters have the same name: got 'french'"),
        (["{}/french", "french={}/french"], "two adapters have the same name: got 'french'"),
        (["to-french={}/french"], "cannot be part of a method's name: got 'to-french'"),
        (["={}/french"], "cannot be part of a method's name: got ''"),
        (["{}/other"], "does not fit the model: got [4, 24] for"),
    ],
)
def test_adapters_that_cannot_be_used_are_one_line(adapters, message, folder, tmp_path, capsys):
    other = save(tmp_path / "unused", "llama", hidden_size=24)
    save_adapter(folder / "other", other, matrices(other, ("q_proj",)))
    output = tmp_path / "out" / "model.pte"
    output.parent.mkdir()
    options = [f"--adapter={adapter.format(folder)}" for adapter in adapters]
    assert main(["export-llm", str(folder / "base"), "-o", str(output), *options]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("coreml-delegate: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert leftovers(output.parent) == set()
