"""Unpatched coremltools still has the fault that each patch mends, and the patch mends it.

A test that fails shows that coremltools has changed: perhaps its patch can go.
``tests/lowering/test_workarounds.py`` has the tests of ``WORKAROUNDS``.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tqdm

from coreml_delegate import opaque_ops, ops
from coreml_delegate.lowering import build
from coreml_delegate.mil.passes import fp32_islands
from coreml_delegate.ops import mil_ops
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches import Patch, coremltools_errors, patched
from coreml_delegate.patches import coremltools as patches
from coreml_delegate.patches.third_party import coremltools, quiet_import

ct = coremltools()
mb = ct.converters.mil.Builder
mil = ct.converters.mil.mil


def _rows() -> Iterator[Patch]:
    for value in (*vars(patches).values(), coremltools_errors.WORKAROUNDS):
        for row in value if isinstance(value, tuple) else (value,):
            if isinstance(row, Patch):
                yield row


@pytest.mark.parametrize("row", list(_rows()), ids=lambda row: f"{row.owner.args[0]}-{row.name}")
def test_the_installed_release_has_the_attribute(row: Patch) -> None:
    assert row.name in vars(row.owner())
    assert importlib.metadata.version("coremltools") in row.versions


def _exponential() -> Any:
    @mb.program(input_specs=[mb.TensorSpec((2, 2))], opset_version=ct.target.iOS17)
    def program(x: Any) -> Any:
        return mb.exp(x=x)

    return program


def _convert(program: Any = None, **options: Any) -> Any:
    return ct.convert(
        program or _exponential(),
        convert_to="milinternal",
        minimum_deployment_target=ct.target.iOS17,
        **options,
    )


def _count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Count the calls of a method, or of a function that takes no arguments."""
    calls: list[Any] = []
    original = getattr(owner, name)

    def count(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, count)
    return calls


def _peak_memory(function: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Time and memory


@pytest.mark.parametrize("name", ["validate", "_propagate_nonreplaceable_vars"])
def test_programs_are_examined_after_each_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = mil.Program if name == "validate" else mil.Block
    calls = _count(monkeypatch, owner, name)
    _convert()
    without = len(calls)
    calls.clear()
    with patched(*patches.faster()):
        _convert()
    assert without > 50
    assert len(calls) < 20


def test_constants_are_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.ones(2**21, np.int8)
    whole = _peak_memory(lambda: np.allclose(values, values.copy(), rtol=0, atol=1e-12))
    with patched(patches.COMPARE_IN_CHUNKS):
        parts = _peak_memory(lambda: np.allclose(values, values.copy(), rtol=0, atol=1e-12))
    assert parts < 0.6 * whole

    @mb.program(input_specs=[mb.TensorSpec((200,))])
    def program(x: Any) -> Any:
        constants = [np.arange(200, dtype=np.float32) for _ in range(2)]
        return mb.mul(x=mb.add(x=x, y=constants[0]), y=constants[1])

    calls = _count(monkeypatch, np, "allclose")
    mil.passes.pass_registry.PASS_REGISTRY["common::const_deduplication"](program)
    assert [call[0].size for call in calls] == [200]


@pytest.mark.parametrize("is_patched", [True, False])
def test_a_half_is_copied_to_be_written(is_patched: bool) -> None:
    from coremltools.converters.mil.backend.mil import helper

    class Writer:
        def write_fp16_data(self, values: np.ndarray[Any, Any]) -> int:
            assert (values.view(np.float16) == 1).all()
            return 0

    class Constant:
        dtype = mil.types.fp16
        val = np.ones((2**10, 2**10), np.float16)

    with patched(*((patches.WRITE_HALVES_UNCOPIED,) if is_patched else ())):
        peak = _peak_memory(lambda: helper._get_offset_by_writing_data(Constant, Writer()))
    # One more byte per value for the comparison above.
    assert (peak < 0.6 * Constant.val.nbytes) if is_patched else (peak > 2 * Constant.val.nbytes)


# Precision


def test_the_overflow_check_takes_memory() -> None:
    checked = mil.passes.defs.quantization.FP16ComputePrecision
    values = np.ones((2**10, 2**10), np.float32)

    @mb.program(input_specs=[mb.TensorSpec(values.shape)])
    def program(x: Any) -> Any:
        return mb.add(x=x, y=values)

    (op,) = program.functions["main"].find_ops(op_type="add")
    assert _peak_memory(lambda: checked.fp16_overflow(op)) > 3 * values.nbytes
    values[:] = 1e5
    with patched(patches.OVERFLOW_CHECK.with_state(fp32_islands.overflows)):
        assert checked.fp16_overflow(op)


def test_functions_see_a_program_before_and_after_its_casts_to_fp16() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2,))])
    def program(x: Any) -> Any:
        return mb.add(x=x, y=np.ones(2, np.float32))

    casts: list[int] = []

    def count(program: Any, *_: Any) -> Any:
        casts.append(len(program.functions["main"].find_ops(op_type="cast")))
        return lambda _: len(casts) > 2

    registry = mil.passes.pass_registry.PASS_REGISTRY
    for _ in range(2):
        with patched(patches.AROUND_FP16_CAST.with_state((count, count))):
            registry["common::add_fp16_cast"](program)
            registry["common::add_int16_cast"](program)
    assert casts == [0, 0, 0, 3]


# Lookups, and the end of a conversion


@pytest.mark.parametrize("handles", [frozenset(), frozenset({7})], ids=["guarded", "natural"])
def test_indices_of_lookups_are_made_positive_but_for_the_named(handles: frozenset[int]) -> None:
    scope = mil.scope.ScopeInfo(source=mil.scope.ScopeSource.EXIR_DEBUG_HANDLE, data=[7])

    @mb.program(
        input_specs=[mb.TensorSpec((3,), dtype=mil.types.int32)], opset_version=ct.target.iOS17
    )
    def program(x: Any) -> Any:
        with mb.scope(scope):
            return mb.gather(x=np.ones((4, 2), np.float32), indices=x)

    with patched(patches.GUARD_INDICES.with_state(handles)):
        mil.passes.pass_registry.PASS_REGISTRY["common::guard_negative_gather_indices"](program)
    assert len(program.functions["main"].find_ops(op_type="select")) == (0 if handles else 1)


def test_a_function_sees_a_program_at_the_end_of_a_conversion() -> None:
    ops: list[str] = []

    def note(program: Any) -> None:
        ops.extend(op.op_type for op in program.functions["main"].operations)

    with patched(patches.BEFORE_NAMES.with_state(note)):
        mil.passes.pass_registry.PASS_REGISTRY["mil_backend::sanitize_name_strings"](_exponential())
    assert ops == ["exp"]


# Palettes with a scale per channel


@pytest.mark.parametrize("is_patched", [True, False])
@pytest.mark.parametrize("channels", [32, 30], ids=["fit", "do not fit"])
def test_palettes_with_scales(channels: int, is_patched: bool) -> None:
    weight = np.random.default_rng(0).random((channels, 64), np.float32)
    held = weight.copy()

    @mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        return mb.linear(x=x, weight=held)

    config = ct.optimize.coreml.OpPalettizerConfig(
        nbits=4,
        granularity="per_grouped_channel",
        group_size=16,
        enable_per_channel_scale=True,
        weight_threshold=0,
    )
    palettize = mil.passes.pass_registry.PASS_REGISTRY["compression::palettize_weights"]
    option = mil.passes.pass_pipeline.PassOption(
        "config", ct.optimize.coreml.OptimizationConfig(config)
    )
    palettize.set_options([option])
    with patched(*(patches.PALETTES_WITH_SCALES if is_patched else ())):
        palettize(program)
    (linear,) = program.functions["main"].find_ops(op_type="linear")
    if channels == 32:
        scaled = "constexpr_lut_to_dense" if is_patched else "constexpr_blockwise_shift_scale"
        assert linear.weight.op.op_type == scaled
    else:
        assert np.array_equal(linear.weight.val, weight) is is_patched


# State of the process


def test_numbers_in_names_are_counted_per_process() -> None:
    first = mb._get_free_name("value")
    assert mb._get_free_name("value") != first
    seen: list[str] = []
    with patched(*patches.own_names()):
        assert [mb._get_free_name("value") for _ in range(2)] == ["value_0", "value_1"]
        thread = threading.Thread(target=lambda: seen.append(mb._get_free_name("value")))
        thread.start()
        thread.join()
        _convert()  # starts from 0 again
        assert mb._get_free_name("value") == "value_0"
    number = int(first.rpartition("_")[2])
    assert [*seen, mb._get_free_name("value")] == [f"value_{number + 2}", f"value_{number + 3}"]


def test_a_conversion_restarts_the_numbers_of_the_process() -> None:
    program = _exponential()
    mb._get_free_name("value")
    _convert(program)
    assert mb._get_free_name("value") == "value_0"


def test_progress_bars_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for row in patches.SILENCE:
        assert vars(row.owner())[row.name] is tqdm.tqdm
    with patched(*patches.SILENCE):
        _convert()
    assert capsys.readouterr().err == ""
    _convert()
    assert "passes" in capsys.readouterr().err


def test_weights_are_written_into_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _count(monkeypatch, tempfile, "gettempdir")
    keywords = {"convert_to": "mlprogram", "minimum_deployment_target": ct.target.iOS17}
    ct.convert(_exponential(), package_dir=str(tmp_path / "first.mlpackage"), **keywords)
    assert calls
    calls.clear()
    folder = tmp_path / "folder"
    folder.mkdir()
    with patched(patches.TEMPORARY_FOLDER.with_state(str(folder))):
        model = ct.convert(_exponential(), skip_model_load=True, **keywords)
        assert Path(model.package_path).parent == folder
    assert not calls


# Translation of torch ops


@pytest.mark.filterwarnings("ignore:Function _TORCH_OPS_REGISTRY:DeprecationWarning")
def test_translations_are_ours_only_while_we_convert() -> None:
    registry = patches._TRANSLATIONS[0].owner()
    ours = {**ops.translations(), **opaque_ops.TRANSLATIONS}
    registered = registry()
    registered.name_to_func_mapping = {
        function.__name__: function for function in patches.registered_translations()
    }
    with patched(*patches.with_translations(ours)):
        assert all(name in registered for name in ours)
        assert registered.get_func("prod.dim_int") is ours["prod.dim_int"]
        assert registered.get_func("relu") is registered.name_to_func_mapping["relu"]
        assert "no_such_op" not in registered
        assert registered.get_func("no_such_op") is None
    assert registered.get_func("prod.dim_int") is None


def test_coremltools_lacks_the_translations_that_we_have() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.prod.dim_int(x, 1, True)

    program = torch.export.export(Model(), (torch.ones(2, 3),)).run_decompositions({})
    with build.convert_program(program, CompileOptions()):
        pass
    from coremltools.converters.mil.frontend.torch import torch_op_registry

    names = set(torch_op_registry._TORCH_OPS_REGISTRY.name_to_func_mapping)
    ours = {"prod.dim_int", *mil_ops.TRANSLATIONS, *opaque_ops.TRANSLATIONS}
    assert not names & ours
    with pytest.raises(NotImplementedError, match=r"prod\.dim_int"), quiet_import():
        _convert(program, source="pytorch")


def test_errors_do_not_name_the_node() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x)

    program = torch.export.export(Model(), (torch.ones(2, 3),)).run_decompositions({})

    def fail(*_: Any) -> None:
        raise ValueError("made to fail")

    failed: list[str] = []
    rows = patches.with_translations({"tanh": fail})
    with (
        pytest.raises(ValueError, match=r"\Amade to fail\Z"),
        patched(*rows, patches.RECORD_FAILURE.with_state(failed)),
    ):
        _convert(program, source="pytorch")
    assert failed == ["tanh"]
