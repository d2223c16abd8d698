"""The layout: four folders at the top are subpackages, and the wheel has all of them."""

import importlib
import subprocess
import sys
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


def test_no_script_shadows_the_standard_library():
    scripts = {p.stem for p in (ROOT / "scripts").glob("*.py")}
    assert not scripts & set(sys.stdlib_module_names)


def test_no_file_has_grown_past_one_room():
    long = {
        str(p.relative_to(ROOT)): n
        for p in ROOT.glob("*/**/*.py")
        if ".venv" not in p.parts
        and not p.is_symlink()
        and (n := len(p.read_text().splitlines())) > 600
    }
    assert not long


@pytest.mark.slow
def test_wheel_has_every_module(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"coreml_delegate/{p.relative_to(ROOT).as_posix().removeprefix('coreml_delegate/')}"
        for folder in ("coreml_delegate", *MAPPED)
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".py", ".cpp", ".h", ".cmake", ".typed") and "__pycache__" not in p.parts
    }
    assert expected <= names
    assert wheel.name.endswith("py3-none-any.whl")
