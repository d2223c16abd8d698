"""``--data`` of ``verify`` and ``quantize-report``: sets that are read one sample at a time."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file
from support.command import MODELS
from torch import nn

from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.exported.source_model import SourceModel
from coreml_delegate.scripts.cli import main
from coreml_delegate.scripts.inputs.data_sets import DataSet
from coreml_delegate.scripts.inputs.images import read_image

pytestmark = pytest.mark.xdist_group("cli")

_ROWS = 6
_ARRAYS = {
    "x": np.random.default_rng(0).standard_normal((_ROWS, 8)).astype(np.float32),
    "y": np.arange(_ROWS * 2, dtype=np.int64).reshape(_ROWS, 1, 2),
    "labels": np.array([3, 1, 4, 1, 5, 9], np.uint8),
}


class _Two(nn.Module):
    def forward(self, x, y):
        return x, y


_TWO = SourceModel(_Two(), (torch.zeros(2, 8), torch.zeros(2, 1, 2, dtype=torch.int64)), {}, None)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _forms() -> dict[str, str]:
    """The same data in every form, by name of the form."""
    np.savez("a.npz", **_ARRAYS)
    np.savez_compressed("b.npz", **dict(reversed(_ARRAYS.items())))
    np.savez("c.npz", **{name: np.asfortranarray(array) for name, array in _ARRAYS.items()})
    save_file(_ARRAYS, "d.safetensors")
    torch.save({name: torch.from_numpy(array) for name, array in _ARRAYS.items()}, "e.pt")
    Path("functions.py").write_text(
        "import numpy, torch\n"
        "def batches():\n"
        "    held = {n: torch.from_numpy(a) for n, a in numpy.load('a.npz').items()}\n"
        "    yield {name: array[:4] for name, array in held.items()}\n"
        "    yield {name: array[4:] for name, array in held.items()}\n"
    )
    return {
        "npz": "a.npz",
        "compressed": "b.npz",
        "fortran": "c.npz",
        "safetensors": "d.safetensors",
        "pt": "e.pt",
        "function": "functions:batches",
    }


@pytest.mark.parametrize("form", ["npz", "compressed", "fortran", "safetensors", "pt", "function"])
def test_every_form_gives_the_same_samples(form, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    data = DataSet(_forms()[form], _TWO)
    for _ in range(2):  # it can be read again
        samples = list(data)
        assert len(samples) == _ROWS // 2
        for name, place in (("x", 0), ("y", 1)):
            got = torch.cat([sample.leaves[place] for sample in samples])
            torch.testing.assert_close(got, torch.from_numpy(_ARRAYS[name]), rtol=0, atol=0)
        labels = torch.cat([sample.labels for sample in samples])
        assert labels.tolist() == _ARRAYS["labels"].tolist()


def _one(shape: tuple[int, ...]) -> SourceModel:
    return SourceModel(nn.Identity(), (torch.zeros(shape),), {}, None)


def test_stacks_and_remainders():
    np.savez("stack.npz", input=np.arange(12, dtype=np.float32).reshape(3, 2, 2))
    stacked = [sample.leaves[0] for sample in DataSet("stack.npz", _one((2, 2)))]
    assert [tuple(tensor.shape) for tensor in stacked] == [(2, 2)] * 3
    np.save("rows.npy", np.arange(14, dtype=np.float32).reshape(7, 2))
    rows = torch.cat([sample.leaves[0] for sample in DataSet("rows.npy", _one((3, 2)))])
    assert rows.reshape(-1).tolist() == list(range(12))
    assert len(list(DataSet("rows.npy", _one((3, 2)), limit=1))) == 1


def test_folders_of_classes_have_labels():
    generator = np.random.default_rng(0)
    for name in ("cat/1.png", "cat/2.png", "ant/9.png"):
        Path("photos", name).parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (9, 9, 3), np.uint8)
        Image.fromarray(pixels).save(Path("photos", name))
    samples = list(DataSet("photos", _one((2, 3, 8, 8))))
    assert [sample.labels.tolist() for sample in samples] == [[0, 0], [1, 1], [1, 1]]
    expected = read_image(Path("photos/ant/9.png"), (2, 3, 8, 8), torch.float32)
    assert torch.equal(samples[0].leaves[0], expected)


def _photos(*names: str) -> None:
    for name in names:
        Path("photos", name).parent.mkdir(parents=True, exist_ok=True)
        Path("photos", name).write_bytes(b"x")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a/1.png", "2.png"], "files beside folders of classes: got 2.png"),
        (["a/b/1.png"], "files of other formats: got b"),
        (["a/1.txt"], "files of other formats: got 1.txt"),
    ],
)
def test_folders_of_another_layout_are_refused(names, message):
    _photos(*names)
    with pytest.raises(OptionError, match=message):
        list(DataSet("photos", _one((1, 3, 8, 8))))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(3, np.int64), r"a.npz are not one class per row: got int64\[3\], expected 6 int"),
        (np.zeros(6, np.float32), r"got float32\[6\]"),
        (np.zeros((6, 1), np.int64), r"got int64\[6, 1\]"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, message):
    np.savez("a.npz", **{**_ARRAYS, "labels": labels})
    with pytest.raises(InputError, match=message):
        list(DataSet("a.npz", _TWO))


@pytest.mark.parametrize("name", ["a.npz", "d.safetensors"])
def test_a_damaged_file_is_an_error(name):
    _forms()
    content = Path(name).read_bytes()
    for length in (0, 10, len(content) // 2):
        Path(name).write_bytes(content[:length])
        with pytest.raises(OptionError, match=f"cannot read the arrays in {name}"):
            list(DataSet(name, _TWO))


def test_memory_does_not_depend_on_the_number_of_samples():
    """A hundred times as many samples, and no more memory than for a few of them."""
    size = 1 << 14
    peaks = []
    for count in (8, 800):
        np.save("a.npy", np.ones((count, size), np.float32))
        data = DataSet("a.npy", _one((1, size)))
        tracemalloc.start()
        assert sum(1 for _ in data) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 4 * size * 4


# By the commands


_SOURCE = [f"{MODELS}:classifier", "--input-shape", "2,3,8,8"]


def test_verify_takes_data_in_any_cut(capsys):
    pixels = np.random.default_rng(0).standard_normal((6, 3, 8, 8)).astype(np.float32)
    labels = np.array([0, 1, 2, 3, 4, 5])
    np.savez("whole.npz", x=pixels, labels=labels)
    Path("cut").mkdir()
    for start in (4, 0, 2):  # read in another order than in the one file
        part = slice(start, start + 2)
        np.savez(f"cut/{9 - start}.npz", x=pixels[part], labels=labels[part])
    assert main(["export", *_SOURCE, "-o", "a.pte"]) == 0
    capsys.readouterr()
    found = []
    for data in ("whole.npz", "cut"):
        assert main(["verify", _SOURCE[0], "a.pte", *_SOURCE[1:], "--data", data, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["outputs"])
    assert found[0] == found[1]
    (output,) = found[0].values()
    assert output["accuracy"]["rows"] == 6
    assert main(["verify", _SOURCE[0], "a.pte", *_SOURCE[1:], "--data", "cut"]) == 0
    assert "output_0: of 6 labels, top-1 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--data", "a.npz", "--data", "b.npz"], 1, "--data names two data sets: got a.npz, b.npz"),
        (["--data", "none.npz", "--input", "x.npy"], 2, "--input and --data exclude each other"),
        (["--data", "none.npz", "--against", "openvino"], 2, "--against takes no data set"),
    ],
)
def test_data_that_are_given_in_vain_are_refused(args, code, message, capsys):
    program = [] if "--against" in args else ["b.pte"]
    try:
        ended = main(["verify", "a.pte", *program, *args])
    except SystemExit as end:
        ended = end.code
    assert (ended, message in capsys.readouterr().err) == (code, True)


def test_the_report_on_layers_compares_on_data(capsys):
    """With the samples that it calibrates with as data, numbers are those without."""
    Path("data").mkdir()
    generator = torch.Generator().manual_seed(1)
    for number in range(4):
        np.save(f"data/{number}.npy", torch.randn(2, 32, generator=generator).numpy())
    report = ["quantize-report", f"{MODELS}:sensitive", "--quantize", "int4-channel", "--json"]
    assert main([*report, "--calibration", f"{MODELS}:sensitive_samples"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert main([*report, "--data", "data"]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert main([*report, "--data", "data", "--samples", "1"]) == 0
    assert json.loads(capsys.readouterr().out) != expected
