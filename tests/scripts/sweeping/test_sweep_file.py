"""The file of a sweep: what it makes jobs of, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coreml_delegate.errors import OptionError
from coreml_delegate.scripts.sweeping.jobs import Job
from coreml_delegate.scripts.sweeping.sweep_file import Limits, SweepFile, read

NET = '[models.net]\nsource = "model:net"\n'


def _read(folder: Path, text: str) -> SweepFile:
    path = folder / "s.toml"
    path.write_text(text)
    return read(path)


def _names(folder: Path, text: str) -> list[str]:
    return [job.name for job in _read(folder, text).jobs]


def test_every_combination_is_a_job(tmp_path):
    text = f"""{NET}[models.other]
source = "model:other"
options = {{ precision = ["float32"] }}
[options]
quantize = ["none", "int8-weight"]
precision = ["float16", "float32"]
"""
    assert _names(tmp_path, text) == [
        "net[float16-none]",
        "net[float16-int8-weight]",
        "net[float32-none]",
        "net[float32-int8-weight]",
        "other[float32-none]",
        "other[float32-int8-weight]",
    ]


def test_a_model_without_options_is_one_job(tmp_path):
    (job,) = _read(tmp_path, NET).jobs
    assert (job.name, job.options.precision, job.options.quantize) == ("net", "float16", "none")


def test_defaults_and_limits(tmp_path):
    file = _read(tmp_path, NET)
    assert (file.limits, file.parallel, file.repeat) == (Limits(), 1, 10)
    text = f'timeout = 1.5\nmemory = "2G"\njobs = 3\nrepeat = 0\nseed = 7\n{NET}samples = 9\n'
    file = _read(tmp_path, text)
    assert file.limits == Limits(1.5, 2 << 30)
    assert (file.parallel, file.repeat) == (3, 0)
    assert (file.jobs[0].model.seed, file.jobs[0].model.samples) == (7, 9)


def test_a_model_overrides_what_holds_for_all(tmp_path):
    (job,) = _read(tmp_path, f"samples = 2\n{NET}samples = 5\n").jobs
    assert job.model.samples == 5


def test_options_that_exclude_each_other_are_skipped(tmp_path):
    options = '[options]\nquantize = ["int4-weight", "int8-weight"]\ntarget = ["iOS17", "iOS18"]\n'
    file = _read(tmp_path, NET + options)
    assert [each.name for each in file.skipped] == ["net[int4-weight-iOS17]"]
    assert "must be iOS18 or higher" in file.skipped[0].reason
    assert len(file.jobs) == 3


def test_excluded_combinations_are_no_jobs(tmp_path):
    text = f"""{NET}[models.other]
source = "model:other"
[options]
precision = ["float16", "float32"]
[[exclude]]
model = "other"
precision = "float32"
"""
    assert _names(tmp_path, text) == ["net[float16]", "net[float32]", "other[float16]"]


def test_a_mixture_of_modes_is_read_beside_the_file(tmp_path):
    mixed = {"schema_version": 1, "mode": "int8-static", "modules": {}}
    (tmp_path / "mixed.json").write_text(json.dumps(mixed))
    options = '[options]\nquantize = ["mixed.json"]\n'
    with pytest.raises(OptionError, match=r"net has no calibration data: got mixed\.json"):
        _read(tmp_path, NET + options)
    assert _names(tmp_path, f'calibration = "photos"\n{NET}{options}') == ["net[mixed.json]"]


def test_a_job_survives_json(tmp_path):
    (job,) = _read(tmp_path, f"{NET}input_shape = [[1, 3], [2]]\n").jobs
    assert job.model.input_shape == ((1, 3), (2,))
    assert Job.from_dict(json.loads(json.dumps(job.as_dict()))) == job


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b", "cannot read "),
        ("", r"there is no model: expected \[models.NAME\]"),
        (f"tmeout = 3\n{NET}", "unknown key: got 'tmeout', expected perhaps timeout"),
        (f"{NET}suorce = 3\n", r"\[models.net\] unknown key: got 'suorce', expected perhaps sour"),
        ("[models.net]\nseed = 1\n", r"\[models.net\] has no source: expected source = "),
        ("[models.net]\nsource = 3\n", r"\[models.net\] source must be text: got int 3"),
        ("[models]\nnet = 3\n", r"\[models.net\] must be a table: got int 3"),
        (f"{NET}input_shape = [[0]]\n", "input_shape must be positive: got int 0"),
        (f"{NET}input_shape = [3]\n", "input_shape must be a list of shapes such as"),
        (f"{NET}[options]\nprecision = 'float16'\n", "precision must be a list of text"),
        (f"{NET}[options]\nprecision = []\n", "precision must not be empty"),
        (f"{NET}[options]\nprecision = ['half']\n", "unknown precision: got 'half', expected floa"),
        (
            f"{NET}[options]\nprecision = ['float16', 'float16']\n",
            "precision must not repeat a value",
        ),
        (f"{NET}[options]\nengine = ['gpu']\n", "unknown engine: got 'gpu', expected auto"),
        (f"{NET}[options]\ntarget = ['iOS9']\n", "unknown deployment target: got 'iOS9'"),
        (
            f"{NET}[options]\nquantize = ['int8-wieght']\n",
            r"\[options\] unknown quantization mode: got 'int8-wieght', expected perhaps int8-w",
        ),
        (f"{NET}[options]\nquantise = ['none']\n", r"\[options\] unknown key: got 'quantise', exp"),
        (f"timeout = 0\n{NET}", "timeout must be a positive number of seconds: got int 0"),
        (f"timeout = true\n{NET}", "timeout must be a positive number of seconds: got bool"),
        (f"memory = 3\n{NET}", "memory must be a size in bytes: got int 3, expected text such"),
        (f"memory = '3X'\n{NET}", "memory must be a size in bytes: got str '3X'"),
        (f"jobs = 0\n{NET}", "jobs must be positive: got int 0"),
        (f"repeat = -1\n{NET}", "repeat must be at least 0: got int -1"),
        (f"seed = -1\n{NET}", "seed must be at least 0: got int -1"),
        (f"exclude = 3\n{NET}", "exclude must be a list of tables"),
        (f"{NET}[[exclude]]\nmodels = 'net'\n", r"\[\[exclude\]\] unknown key: got 'models', expe"),
        (f"{NET}[[exclude]]\nmodel = 'nat'\n", r"\[\[exclude\]\] names no model: got 'nat', expec"),
        (
            f"{NET}[[exclude]]\nmodel = 'net'\n",
            "no job is left: got every combination is excluded",
        ),
        (
            f"{NET}[options]\nquantize = ['int4-weight']\ntarget = ['iOS17']\n",
            r"no job is left: got net\[int4-weight-iOS17\]: target must be iOS18",
        ),
        (f"{NET}[options]\nquantize = ['no.json']\n", "cannot read .*no.json"),
    ],
)
def test_what_is_wrong_is_said(text, message, tmp_path):
    with pytest.raises(OptionError, match=message) as caught:
        _read(tmp_path, text)
    assert str(tmp_path / "s.toml") in str(caught.value)
