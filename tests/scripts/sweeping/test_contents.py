"""Keys of jobs: they change with whatever a job reads, and with nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coreml_delegate.errors import OptionError
from coreml_delegate.scripts.sweeping import contents
from coreml_delegate.scripts.sweeping.contents import digest, key, module_files, read_by
from coreml_delegate.scripts.sweeping.jobs import Job, Model, Options

JOB = Job("net", "net", Model("model:net"), Options())


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def folder(tmp_path):
    _write(tmp_path, {"model.py": "import layers\n", "layers.py": "x = 1\n", "other.py": "y = 1\n"})
    return tmp_path


def test_imports_are_followed(tmp_path):
    files = {
        "model.py": "def f():\n    from pack.inner import thing\nimport torch, lone as l\n",
        "lone.py": "",
        "stranger.py": "",
        "pack/__init__.py": "from . import aside\n",
        "pack/aside.py": "",
        "pack/unused.py": "",
        "pack/inner/__init__.py": "from ..base import Base\n",
        "pack/inner/thing.py": "import model\n",
        "pack/base.py": "",
    }
    _write(tmp_path, files)
    found, elsewhere = module_files(tmp_path, "model")
    assert {path.relative_to(tmp_path).as_posix() for path in found} == set(files) - {
        "stranger.py",
        "pack/unused.py",
    }
    assert elsewhere == {"torch"}


def test_an_installed_module_counts_with_its_own_package(tmp_path, monkeypatch):
    _write(
        tmp_path,
        {
            "site/models/__init__.py": "",
            "site/models/net.py": "import models.parts\nimport library\n",
            "site/models/parts.py": "",
            "site/library.py": "",
            "here/s.toml": "",
        },
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    job = replace(JOB, model=Model("models.net:net"))
    found = read_by(job, tmp_path / "here")["source"]
    assert found.root == tmp_path / "site"
    assert set(found.files) == {"models/__init__.py", "models/net.py", "models/parts.py"}


@pytest.mark.parametrize("name", ["model.py", "layers.py"])
def test_a_key_changes_with_each_file(name, folder):
    before = key(JOB, folder)
    assert key(JOB, folder) == before
    with (folder / name).open("a") as file:
        file.write("# changed\n")
    assert key(JOB, folder) != before


def test_a_key_does_not_change_with_what_is_not_read(folder, tmp_path_factory):
    before = key(JOB, folder)
    (folder / "other.py").write_text("y = 2\n")
    assert key(replace(JOB, name="a", label="b"), folder) == before
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("model.py", "layers.py"):
        (elsewhere / name).write_text((folder / name).read_text())
    assert key(JOB, elsewhere) == before


def test_a_key_has_contents_in_place_of_paths(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    _write(folder, {"data/1.npy": "1", "w.pt": "w"})
    _write(elsewhere, {"others/1.npy": "1", "v.pt": "w"})
    jobs = [
        replace(JOB, model=replace(JOB.model, data="data", weights="w.pt")),
        replace(
            JOB,
            model=replace(
                JOB.model, data=str(elsewhere / "others"), weights=str(elsewhere / "v.pt")
            ),
        ),
    ]
    first, second = (key(job, folder) for job in jobs)
    assert first == second
    (elsewhere / "v.pt").write_text("x")
    assert key(jobs[1], folder) != first
    assert key(replace(JOB, model=replace(JOB.model, data="data")), folder) != first


@pytest.mark.parametrize(
    "other",
    [
        replace(JOB, options=Options(precision="float32")),
        replace(JOB, model=replace(JOB.model, seed=1)),
        replace(JOB, model=replace(JOB.model, source="model:other")),
    ],
    ids=["options", "model", "factory"],
)
def test_a_key_changes_with_options_and_model(other, folder):
    assert key(other, folder) != key(JOB, folder)


def test_a_key_changes_with_the_versions_of_imported_packages(folder, monkeypatch):
    (folder / "layers.py").write_text("from transformers.models import llama\n")
    before = key(JOB, folder)
    version = contents.version_of
    others = {"transformers": "0.1", "timm": "0.1"}
    monkeypatch.setattr(contents, "version_of", lambda name: others.get(name) or version(name))
    assert key(JOB, folder) != before
    (folder / "layers.py").write_text("x = 1\n")
    unaffected = key(JOB, folder)
    monkeypatch.undo()
    assert key(JOB, folder) == unaffected


def test_a_key_changes_with_versions(folder, monkeypatch):
    before = key(JOB, folder)
    monkeypatch.setattr(contents, "environment", lambda: {"torch": "another"})
    assert key(JOB, folder) != before


def test_a_folder_counts_with_names_and_contents(folder):
    data = folder / "data"
    _write(data, {"a/1.npy": "1", "b/2.npy": "2", ".hidden": "x"})
    before = digest(data)
    (data / ".hidden").write_text("y")
    assert digest(data) == before
    (data / "a" / "1.npy").rename(data / "b" / "1.npy")
    moved = digest(data)
    assert moved != before
    (data / "b" / "1.npy").write_text("11")
    assert digest(data) not in (before, moved)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model("absent:net"), "no such Python module: got 'absent'"),
        (Model("absent.pt2"), "no such file or folder: got absent.pt2"),
        (Model("model:net", weights="absent.pt"), "no such file or folder: got absent.pt"),
        (Model("broken:net"), "broken.py is no Python module"),
    ],
)
def test_what_does_not_exist_is_refused(model, message, folder):
    (folder / "broken.py").write_text("def\n")
    with pytest.raises(OptionError, match=message):
        key(replace(JOB, model=model), folder)
