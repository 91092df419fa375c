"""Gradients of 16 bits are summed over slices in fp32, and rounded once."""

from typing import Any

import torch
from torch import nn

from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.operators.gradient_sums import GradientSums
from ds_terapipe.pipeline.stage import Stage


def test_the_end_of_another_stage_on_the_place_rounds_no_sum_of_16_bits() -> None:
    rules: Any = None  # no backward pass runs
    stage = Stage(0, [nn.Linear(1, 1), nn.Linear(1, 1, dtype=torch.bfloat16)], 0, gradients=rules)
    stage.begin(StepBatch(), None, weights_apart=False)
    (mine, other), slices = stage._summed, [1.0, 2.0**-9, 2.0**-9, 2.0**-9]  # each of the last three is lost beside 1
    for others_end in (0, 1, 3):
        sums = GradientSums()
        for number, gradient in enumerate(slices):
            mine.grad, other.grad = torch.full_like(mine, gradient), torch.ones_like(other)
            sums.put_aside([mine])
            if number < others_end:
                sums.give_back([other])
                assert mine.grad is None and other.grad is not None
        sums.give_back([mine])
        assert mine.grad is not None and mine.grad.item() == torch.tensor(sum(slices)).bfloat16().item() > 1
