"""``coreml-delegate demo``, as ``make demo`` runs it."""

from __future__ import annotations

import re

import pytest

from coreml_delegate.scripts.cli import main


@pytest.mark.slow
@pytest.mark.xdist_group("demo")
def test_demo_runs_and_replaces_its_outputs(tmp_path, capsys):
    folder = tmp_path / "out"
    contents = []
    for _ in range(2):
        assert main(["demo", "-o", str(folder), "--repeat", "3"]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        assert {p.name for p in folder.iterdir()} == {"mv2.pte", "mv2.mlpackage"}
        contents.append((folder / "mv2.pte").read_bytes())
        sqnr = re.search(r"SQNR against eager PyTorch +([\d.]+) dB", captured.out)
        assert sqnr is not None
        assert float(sqnr[1]) > 30
        assert re.search(r"partitions +1\n", captured.out)
        assert re.search(r"extracted package +gives the same output as the \.pte\n", captured.out)
    assert contents[0] == contents[1]
