"""Milestones of quantization-aware training."""

from __future__ import annotations

import copy

import pytest
import torch
from support.quantization import (
    LinearQuantizerConfig,
    config,
    exported,
    layer,
    prepare_pt2e,
    prepare_qat_pt2e,
)
from torch import nn
from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase

from coreml_delegate.errors import OptionError
from coreml_delegate.quantizer import CoreMLQuantizer, MilestoneSchedule

X = (torch.rand(4, 4),)


def _switches(model):
    """Return for every fake quantization whether it observes and whether it quantizes."""
    modules = [m for m in model.modules() if isinstance(m, FakeQuantizeBase)]
    return {(int(m.observer_enabled[0]), int(m.fake_quant_enabled[0])) for m in modules}


def _prepared(settings):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    quantizer = CoreMLQuantizer(settings)
    return quantizer, prepare_qat_pt2e(exported(module, X), quantizer)


def test_each_milestone_switches_at_its_step():
    quantizer, model = _prepared(config(milestones=[1, 2, 3, -1]))
    assert _switches(model) == {(1, 1)}, "without a schedule everything is on"
    schedule = quantizer.schedule(model)
    seen = [_switches(model)]
    for _ in range(4):
        schedule.step()
        seen.append(_switches(model))
    assert seen == [{(0, 0)}, {(0, 0)}, {(1, 0)}, {(1, 1)}, {(0, 1)}]
    assert schedule.steps == 4


def test_layers_have_milestones_of_their_own():
    names = {"0": layer(milestones=[0, 0, -1, -1])}
    quantizer, model = _prepared(LinearQuantizerConfig(layer(), module_name_configs=names))
    quantizer.schedule(model)
    # The second layer takes no part: its weight and result are quantized as ever.
    assert _switches(model) == {(0, 0), (1, 1)}


def test_a_copy_of_the_model_can_be_trained():
    _, model = _prepared(config(milestones=[0, 0, 5, -1]))
    copied = copy.deepcopy(model)
    MilestoneSchedule(copied).step()
    assert _switches(copied) == {(1, 1)}


def test_norms_are_frozen():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    quantizer = CoreMLQuantizer(config(milestones=[0, 0, -1, 1]))
    # Linear layers keep their norm, for which torchao need not fuse anything.
    graph = exported(module.train(), X)
    quantizer.annotate(graph)
    quantizer.validate(graph)
    model = _prepare_without_fusion(graph, quantizer)
    schedule = quantizer.schedule(model)
    (norm,) = (n for n in model.graph.nodes if n.target is torch.ops.aten.batch_norm.default)
    schedule.step()
    assert norm.args[5] is True
    schedule.step()
    assert norm.args[5] is False
    before = model.get_buffer("1.running_mean").clone()
    model(*X)
    assert torch.equal(model.get_buffer("1.running_mean"), before)


def _prepare_without_fusion(graph, quantizer):
    """Prepare as ``prepare_qat_pt2e`` does, without its search of fusable batch norms."""
    from torchao.quantization.pt2e.prepare import prepare

    return prepare(graph, {}, is_qat=True, obs_or_fq_callback=quantizer.prepare_obs_or_fq_callback)


def test_a_configuration_without_milestones_is_refused():
    quantizer, model = _prepared(config())
    with pytest.raises(OptionError, match="the configuration has no milestones"):
        quantizer.schedule(model)
    with pytest.raises(OptionError, match="the model has no milestones"):
        MilestoneSchedule(model)


def test_a_model_of_another_quantizer_is_refused():
    quantizer, _ = _prepared(config(milestones=[0, 0, 5, -1]))
    plain = prepare_pt2e(exported(nn.Linear(4, 2).eval(), X), CoreMLQuantizer(config()))
    with pytest.raises(OptionError, match="the model has no milestones"):
        quantizer.schedule(plain)
