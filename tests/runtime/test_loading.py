"""``runtime.load``: every format by the same calls, also on the engine with the program's types."""

from pathlib import Path

import pytest
import torch
from support.command import tiny_pte

from coreml_delegate import runtime
from coreml_delegate.errors import BlobFormatError, OptionError
from coreml_delegate.formats.files import write_folder
from coreml_delegate.runtime.delegate import blob_files
from coreml_delegate.runtime.program.pte import PteProgram

pytestmark = pytest.mark.xdist_group("cli")


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    """A program, the blob of its first delegate, and the mlpackage in the blob."""
    folder = tmp_path_factory.mktemp("formats")
    paths = {name: folder / f"tiny.{name}" for name in ("pte", "blob", "mlpackage")}
    paths["pte"].write_bytes(tiny_pte())
    blob = PteProgram.open(paths["pte"]).method("forward").delegates[0].processed
    paths["blob"].write_bytes(blob)
    write_folder(blob_files(blob)[0], paths["mlpackage"])
    return paths


X = torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16)


@pytest.mark.parametrize("form", ["pte", "blob", "mlpackage"])
def test_every_format_runs_and_is_diagnosed(paths, form):
    program = runtime.load(paths[form], engine=None)
    assert [(i.dtype, i.shape) for i in program.inputs] == [(torch.float32, (1, 3, 16, 16))]
    assert str(program.execution) == "reference in fp16"
    outputs = program.run([X])
    (name, diagnosis), *_ = program.diagnose([X])
    assert name == ("forward_0" if form == "pte" else "tiny")
    assert diagnosis.first_bad is None
    assert program.states() == {}
    assert all(value.isfinite().all() for value in outputs.values())


def test_a_blob_is_the_model_in_it(paths):
    one, other = (runtime.load(paths[form]).run([X]) for form in ("blob", "mlpackage"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_values_of_a_program_need_the_reference_engine(paths):
    with pytest.raises(OptionError, match="only the reference engine shows the values"):
        runtime.load(paths["pte"], engine="openvino").diagnose([X])


@pytest.mark.parametrize("options", [{"host": "stock"}, {"data": ["a.ptd"]}])
def test_options_of_a_program_are_refused_for_models(paths, options):
    with pytest.raises(OptionError, match=f"{next(iter(options))} is for a .pte"):
        runtime.load(paths["blob"], **options)


def test_events_are_those_of_a_program(paths):
    for form in ("blob", "mlpackage"):
        with pytest.raises(OptionError, match="has events for ExecuTorch"):
            runtime.load(paths[form], enable_etdump=True)
    with pytest.raises(OptionError, match="the program has no events"):
        runtime.load(paths["pte"]).events()


def test_other_bytes_are_no_program(tmp_path):
    path = tmp_path / "text.pte"
    path.write_text("no program")
    with pytest.raises(BlobFormatError, match=r"text\.pte"):
        runtime.load(path)
