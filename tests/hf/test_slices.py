"""The layers that ds_terapipe.hf makes of a model, run slice by slice, have the unmodified model's loss and gradients."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ds_terapipe import hf
from ds_terapipe.hf.check import Exact
from ds_terapipe.hf.decoder_pipeline import _built, _specs
from ds_terapipe.hf.loss import CausalLMLoss
from ds_terapipe.hf.positions import documents_of
from ds_terapipe.hf.source import source_of
from ds_terapipe.pipeline.loss import MicroBatchLoss
from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.slicing import TensorCut, spans
from ds_terapipe.schedule import Unit
from tests.hf.families import features, model_of, without_key_biases

ONES, UNEVEN = (1, 8, 1, 13, 1), (11, 7, 5, 1)
CASES: list[tuple[str, str, tuple[int, ...]]] = [
    ("llama", "front", ONES), ("llama", "behind", UNEVEN), ("llama, tied, dynamic", "plain", UNEVEN), ("qwen2", "behind", ONES),
    ("mistral", "counted", UNEVEN), ("qwen3", "packed", UNEVEN), ("gemma2", "packed", ONES), ("gemma2", "front", UNEVEN),
    ("gemma3", "shifted", UNEVEN), ("phi3", "front", UNEVEN), ("olmo2", "counted", ONES), ("gpt2", "shifted", UNEVEN),
    ("gpt2", "behind", ONES), ("gpt_neox", "packed", UNEVEN), ("mistral", "plain", (24,)), ("gemma2", "plain", (24,)),
]  # fmt: skip


def in_slices(model: Any, features: dict[str, torch.Tensor], lengths: tuple[int, ...]) -> float:
    """The loss of a copy's layers, one after the other; gradients are left in ``model``."""
    layers = [_built(spec) for spec in _specs(source_of(model, None, 0))]
    (inputs, labels), cuts = hf.batch(features), spans(lengths)
    tokens, *numbers = inputs if isinstance(inputs, tuple) else (inputs,)
    context, loss = SliceContext(), MicroBatchLoss(CausalLMLoss(), labels, (TensorCut(1),), (TensorCut(1),), cuts)
    documents = documents_of(inputs)
    context.documents_of = {} if documents is None else {0: documents}
    for index, span in enumerate(cuts):
        part = tokens[:, span.start : span.stop]
        value: Any = (part, *numbers) if numbers else part
        with context.forward(Unit(0, index), span):
            for number, layer in enumerate(layers):
                context.enter_layer(number)
                value = layer(value)
            loss.add(value)
    for index in reversed(range(len(cuts))):
        with context.backward(Unit(0, index), cuts[index]):
            loss.backward(index, lambda term: term)
    return float(loss.value)


def test_the_mean_over_a_step_with_fewer_labels_than_micro_batches_is_over_its_labels() -> None:
    loss, logits = CausalLMLoss("step"), torch.randn(2, 1, 3, 7)
    labels = torch.full((2, 1, 3), -100)
    labels[0, 0, 2] = 5
    loss.begin_step(loss.step_weight(list(labels)))
    mean = torch.stack([loss(*each) for each in zip(logits, labels, strict=True)]).mean()
    torch.testing.assert_close(mean, F.cross_entropy(logits[0, 0, 1], torch.tensor(5)))


@pytest.mark.parametrize(("family", "kind", "lengths"), CASES)
def test_layers_in_slices_have_the_model_s_loss_and_gradients(family: str, kind: str, lengths: tuple[int, ...]) -> None:
    # gemma2's own softmax is in fp32, and in fp64 a token that sees nothing is NaN
    wide = (family, kind) != ("gemma2", "front")
    limit = 1e-10 if wide else 1e-5
    model, given = model_of(family, torch.float64 if wide else torch.float32).train(), features(kind, 3)
    if family == "qwen3":  # cut by hand: a layer is where one without a window was, and has a configuration of its own
        model.model.layers[2] = copy.deepcopy(model.model.layers[2])
        model.model.layers, model.config.num_hidden_layers = model.model.layers[1:], 3
    ours = copy.deepcopy(model)
    with Exact() if wide else nullcontext():
        wanted = model(**given, use_cache=False).loss
        wanted.backward()
        loss = in_slices(ours, given, lengths)
    assert loss == pytest.approx(float(wanted.detach()), rel=limit)
    for name, parameter in model.named_parameters():
        got, expected = (without_key_biases(model.config, name, p.grad) for p in (ours.get_parameter(name), parameter))
        assert (got - expected).norm() <= limit * expected.norm(), name
