"""The layout: four folders at the top are subpackages, and the wheel has all of them."""

import importlib
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAPPED = ("partition", "quantizer", "runtime", "scripts")
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
SETUPTOOLS = TOOLS["setuptools"]


def _packages_in_tree() -> set[str]:
    roots = {"coreml_delegate": ROOT / "coreml_delegate"}
    roots |= {f"coreml_delegate.{name}": ROOT / name for name in MAPPED}
    found = set()
    for package, folder in roots.items():
        for init in folder.rglob("__init__.py"):
            inside = init.parent.relative_to(folder).parts
            if package == "coreml_delegate" and inside[:1] and inside[0] in MAPPED:
                continue
            found.add(".".join((package, *inside)))
    return found


def test_every_package_of_the_tree_is_listed():
    assert sorted(SETUPTOOLS["packages"]) == sorted(_packages_in_tree())


@pytest.mark.parametrize("name", MAPPED)
def test_links_are_relative_and_lead_home(name):
    link = ROOT / "coreml_delegate" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert importlib.import_module(f"coreml_delegate.{name}").__name__ == f"coreml_delegate.{name}"


def test_types_are_checked_in_every_subpackage():
    linked = {f"coreml_delegate/{name}" for name in MAPPED}
    assert set(TOOLS["pyright"]["include"]) == {"coreml_delegate", *linked}


@pytest.mark.parametrize("name", MAPPED)
def test_bare_names_are_refused(name):
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"import coreml_delegate.{name} instead" in done.stderr


def test_python_may_compile_installed_modules_during_the_tests():
    source = r"pattern = '\s'"
    compile(source, "/venv/lib/site-packages/other/module.py", "exec")
    with pytest.raises(SyntaxError, match="invalid escape sequence"):
        compile(source, str(ROOT / "coreml_delegate" / "own.py"), "exec")


def test_a_shim_without_a_python_behind_it_is_passed_over(tmp_path):
    shim = tmp_path / "python3.98"
    python = tmp_path / "versions" / "3.98.1" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for file, code in ((shim, 127), (python, 0)):
        file.write_text(f"#!/bin/sh\nexit {code}\n")
        file.chmod(0o755)
    paths = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYENV_ROOT": str(tmp_path)}
    command = [ROOT / ".ci" / "find-python", "3.99", "3.98"]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, check=True)
    assert done.stdout.decode().strip() == str(python)


def test_no_script_shadows_the_standard_library():
    scripts = {p.stem for p in (ROOT / "scripts").glob("*.py")}
    assert not scripts & set(sys.stdlib_module_names)


def test_no_file_has_grown_past_one_room():
    long = {
        str(p.relative_to(ROOT)): n
        for p in ROOT.glob("*/**/*.py")
        if p.relative_to(ROOT).parts[0] not in (".venv", "build")
        and not p.is_symlink()
        and (n := len(p.read_text().splitlines())) > 600
    }
    assert not long


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The source distribution, and the wheel that is built of it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (source,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return source, wheel


@pytest.mark.slow
def test_wheel_has_every_module(distributions):
    _, wheel = distributions
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"coreml_delegate/{p.relative_to(ROOT).as_posix().removeprefix('coreml_delegate/')}"
        for folder in ("coreml_delegate", *MAPPED)
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".py", ".cpp", ".h", ".cmake", ".typed") and "__pycache__" not in p.parts
    }
    assert expected <= names
    assert wheel.name.endswith("py3-none-any.whl")


def test_links_of_documents_lead_to_documents_of_a_wheel():
    groups = TOOLS["setuptools"]["data-files"].values()
    documents = {path for patterns in groups for pattern in patterns for path in ROOT.glob(pattern)}
    shipped = {*documents, *(folder for path in documents for folder in path.parents)}
    broken = {
        (path.name, link)
        for path in documents
        if path.suffix == ".md"
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", path.read_text())
        if Path(os.path.normpath(path.parent / link)) not in shipped
    }
    assert broken == set()


@pytest.mark.slow
def test_links_of_the_readme_lead_somewhere_in_a_wheel(distributions):
    _, wheel = distributions
    folder = f"{wheel.name.removesuffix('-py3-none-any.whl')}.data/data/share/doc/coreml-delegate"
    root = zipfile.Path(wheel, f"{folder}/")
    links = re.findall(r"\]\((?!https:)([^)#]+)", (root / "README.md").read_text())
    assert len(links) > 20
    assert [link for link in links if not (root / link).exists()] == []


@pytest.mark.slow
def test_source_distribution_has_all_tests(distributions):
    source, _ = distributions
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tests = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("*.py")}
    assert tests <= names
