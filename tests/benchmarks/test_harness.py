"""The benchmark harness: its models, clock, tables, and one small run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tolerances import SQNR_FP32

from benchmarks import TESTS, report
from benchmarks.contenders import CONTENDERS, EAGER, Contender, NotAvailableError, Settings
from benchmarks.footprint import probe
from benchmarks.measuring import Bench, Row
from benchmarks.models import Decoder, ExplicitState, Workload, perceptron
from benchmarks.timing import Turn, race

_BY_NAME = {contender.name: contender for contender in CONTENDERS}
_OURS = _BY_NAME["ours float32, openvino"]
_ABSENT = replace(_OURS, name="absent", requires=("no_such_package",))


def _fails(path: Path, settings: Settings):
    raise NotAvailableError(f"no luck with {path.name}")


_PROGRAMS = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if path != Path(__file__) and "ArgumentParser(" in path.read_text(encoding="utf-8")
)


@pytest.mark.slow
@pytest.mark.parametrize("name", _PROGRAMS)
def test_each_program_begins_as_the_documentation_says(name):
    """With the folder of the checkout alone in the path of modules."""
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", "--help"]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("usage: python -m tests.benchmarks"), done.stderr


def _decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(layers=2, dim=16, heads=2, hidden=24, vocabulary=32, context=8).eval()


def test_a_decoder_step_by_step_is_a_decoder_at_once():
    tokens = torch.tensor([[3, 1, 4, 1]])
    with torch.no_grad():
        at_once = _decoder()(tokens, torch.tensor([0]))
        stepwise, explicit = _decoder(), ExplicitState(_decoder())
        caches = [cache.clone() for cache in explicit.decoder.caches]
        for place in range(tokens.shape[1]):
            step = tokens[:, place : place + 1], torch.tensor([place])
            kept = stepwise(*step)
            carried, *caches = explicit(*step, *caches)
    torch.testing.assert_close(kept, at_once)
    torch.testing.assert_close(carried, at_once)
    assert not any(cache.any() for cache in explicit.decoder.caches)


def test_a_race_times_everyone_by_their_share():
    calls = {"whole": 0, "fifth": 0}

    def count(name: str) -> None:
        calls[name] += 1

    medians = race(
        {n: Turn(lambda n=n: count(n), s) for n, s in (("whole", 1), ("fifth", 0.2))}, 10
    )
    assert all(0 < seconds < 1e-2 for seconds in medians.values())
    bursts = 50 + 1  # calls that take no time are timed fifty at once, after one that is not
    assert calls == {"whole": 3 + 10 * bursts, "fifth": 3 + 2 * bursts}


@pytest.mark.slow
def test_a_small_run(tmp_path):
    torch.manual_seed(0)
    workload = Workload("mlp", "MLP", perceptron().eval(), (torch.randn(1, 256),))
    broken = Contender("broken", "module.pt", _fails, lambda: None)
    bench = Bench(workload, [_BY_NAME[EAGER], _OURS, _ABSENT, broken], tmp_path, threads=1)
    eager, ours, absent, failed = bench.run(2, footprints=False)
    assert (eager.sqnr, eager.note) == (np.inf, "")
    assert ours.sqnr is not None
    assert ours.sqnr > SQNR_FP32
    assert ours.seconds is not None
    assert 0 < ours.seconds < 1
    assert absent == Row("absent", note="not installed: pip install '.[bench]'")
    assert failed == Row("broken", note="no luck with module.pt")

    settings = Settings(1, tmp_path / "cache")
    np.savez(tmp_path / "inputs.npz", *[tensor.numpy() for tensor in workload.inputs])
    footprint = probe(_OURS, tmp_path / "float32.pte", tmp_path / "inputs.npz", settings)
    assert 0 < footprint.seconds < 60
    assert footprint.peak_bytes > 1e5
    with pytest.raises(NotAvailableError, match=r"gone\.pte"):
        probe(_OURS, tmp_path / "gone.pte", tmp_path / "inputs.npz", settings)


def test_tables(tmp_path):
    rows = [
        Row(EAGER, 0.002, np.inf),
        Row("other", 0.001, 61.7, 0.25, 0.125, 3_000_000),
        Row("absent", note="not installed"),
    ]
    text = report.markdown([report.Result("MLP", rows)], "a machine")
    assert text.splitlines()[:3] == ["Measured on: a machine.", "", "### MLP"]
    assert text.splitlines()[6:] == [
        "| torch eager | 2 | 1.00 | exact |  |  |  |",
        "| other | 1 | 0.50 | 62 | 0.25 | 0.12 | 3 |",
        "| absent | not installed |  |  |  |  |  |",
    ]
    assert report.table(report.Result("MLP", rows)).row_count == 3
    names = ("XNNPACK .pte", "ours float32, openvino", "ours float32, openvino, stock host")
    timed = [
        report.Result(title, [Row(EAGER, 1.0), *(map(Row, names, seconds))])
        for title, seconds in (("A", (0.2, 0.1, 0.4)), ("B", (0.4, 0.8, 0.4)))
    ]
    assert report.markdown([*timed, report.Result("C", rows)], "it").splitlines()[-5:] == [
        "| ours float32 | python host | stock host |",
        "| --- | ---: | ---: |",
        "| A | 0.50 | 2.00 |",
        "| B | 2.00 | 1.00 |",
        "| geometric mean | 1.00 | 1.41 |",
    ]
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- tables: begin -->\nold\n<!-- tables: end -->\nend\n")
    report.write_markdown(page, "new")
    assert page.read_text() == (
        "# Page\n\n<!-- tables: begin -->\nnew\n<!-- tables: end -->\nend\n"
    )
    page.write_text("# Page\n")
    with pytest.raises(ValueError, match="has no lines"):
        report.write_markdown(page, "new")
