"""Gradients of several replicas that are reduced early and where they are, and clipped: bit for bit as by DeepSpeed's copies."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ds_terapipe.clipping import clip_gradients
from ds_terapipe.pipeline import replicas
from ds_terapipe.pipeline.gradients import reduce_tied
from ds_terapipe.schedule import Action, Op, Unit
from tests.elastic.training import PRECISIONS
from tests.pipeline.models import HIDDEN, Block, gpt, masked_loss, steps_of
from tests.pipeline.training import ADAMW, allow_fp16, build_engine, mine
from tests.spawn import launched

LARGE, STEPS = 30, 3
COMM_FP16, COMM_FP32 = {"communication_data_type": "fp16"}, {"communication_data_type": "fp32"}
PREDIVIDED, PRESCALED = {"gradient_predivide_factor": 3.0}, {"prescale_gradients": True, "gradient_predivide_factor": 3.0}
FP16 = {"fp16": {"enabled": True, "loss_scale": 2.0**-8}}  # gradients of few bits, which a division rounds
FP32_SUMS = {**FP16, "data_types": {"grad_accum_dtype": "fp32"}}
SUMMED = "gradient_average"  # an attribute
SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {SUMMED: False}, PREDIVIDED, PRESCALED, COMM_FP16, FP16, PRECISIONS["bf16"], PRECISIONS["bf16 ZeRO-1"],
)  # fmt: skip
APART, WHOLE = {"contiguous_gradients": False}, {"reduce_scatter": False}
OF_ZERO: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (  # keys of ``zero_optimization``, and others
    ({}, {}), ({}, {SUMMED: False}), ({}, COMM_FP16), (APART, COMM_FP16), (WHOLE, PREDIVIDED), ({}, FP16),
    ({}, {**FP16, **COMM_FP32}), (APART, FP32_SUMS), ({}, FP32_SUMS),
    ({}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
)  # fmt: skip
SETTINGS += tuple({**others, "zero_optimization": {"stage": 1, "reduce_bucket_size": 10000, **keys}} for keys, others in OF_ZERO)


def trained(setting: dict[str, Any], alone: int) -> tuple[list[torch.Tensor], list[Any], int, int, int]:
    """Weights, losses and norms after some steps; elements sent and copied into flat ones; gradients that began."""
    flatten = torch._utils._flatten_dense_tensors
    send, begin, flatten = (mock.Mock(wraps=each) for each in (dist.all_reduce, replicas._begin, flatten))
    config = {key: value for key, value in setting.items() if key != SUMMED}
    with mock.patch.multiple(replicas, _ALONE=alone, _begin=begin), mock.patch.object(dist, "all_reduce", send):
        keys, (first, _, *others) = {"slices": 3}, gpt()
        torch.manual_seed(STEPS)
        model = [first, layer := Block(), *others]
        if "zero_optimization" not in setting:  # which leaves weights out that no backward pass comes to
            layer.spare = torch.nn.Linear(HIDDEN, HIDDEN)
        engine = build_engine(model, masked_loss, token_pipeline=keys, stages=1, optimizer=ADAMW, clip=0.5, config=config)
        engine.flatten = flatten
        engine.gradient_average = engine.optimizer.gradient_average = setting.get(SUMMED, True)
        if not config:  # a gradient has the strides of its weight
            weight = next(each for each in engine.module.parameters() if each.dim() > 1)
            weight.data = weight.data.t().contiguous().t()
        scalars = []
        for step in steps_of(STEPS, 4):
            scalars += [engine.train_batch(iter(mine(engine, step))), engine.get_global_grad_norm()]
    weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    assert not engine._replicas._begun, "which would hold gradients"
    engine.destroy()
    sent = sum([*call.args, *call.kwargs.values()][0].numel() for call in send.call_args_list)
    copied = sum(each.numel() for call in flatten.call_args_list for each in call.args[0])
    return weights, scalars, sent, copied, begin.call_count


def every_setting(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Copied elements with each setting, and those that DeepSpeed copies."""
    allow_fp16()
    found = []
    for setting in SETTINGS:
        ours, scalars, sent, copied, early = trained(setting, LARGE)
        theirs, wanted, all_sent, all_copied, none = trained(setting, 10**9)
        torch.testing.assert_close([*ours, *scalars], [*theirs, *wanted], rtol=0, atol=0, msg=str(setting))
        assert sent == all_sent and early > none == 0, setting
        found.append((copied, all_copied))
    return found


ranks = launched(every_setting, 2)


def test_gradients_come_out_with_the_bits_of_deepspeeds_and_without_its_copies(ranks: list[Any]) -> None:
    for found in ranks:
        assert found[SETTINGS.index(PREDIVIDED)][0] == 0 < found[0][0], "but for one that is not contiguous"
        # in messages of another type the first step's are, before the replicas are connected
        assert all(2 * copied < everything for copied, everything in found[: -len(OF_ZERO)])


def test_stages_begin_in_one_order_whichever_ends_first() -> None:
    engine, begun, row = mock.MagicMock(), [], [Action(Op.BACKWARD, stage, Unit(0, 0)) for stage in (1, 3)]
    gradients = replicas.ReplicaGradients(engine, {})
    with mock.patch.multiple(gradients, _can_begin=lambda: True, _of_stage=lambda stage: begun.append(stage) or []):
        for step in range(2):
            gradients.expect(row)
            gradients.action_ends(row[0])
            assert len(begun) == 2 * step
            gradients.action_ends(row[1])
    assert begun == [3, 1] * 2


def test_rows_of_a_sparse_gradient_are_added_before_their_norm_and_a_tied_one_is_reduced_with_all_rows() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True, dtype=torch.float64)
    table(torch.tensor([1, 1, 3])).sum().backward()
    gradient, tied = table.weight.grad.to_dense(), SimpleNamespace(get_tied_weights_and_groups=lambda: [(table.weight, None)])
    norm = clip_gradients(table.parameters(), 0.5, None, torch.device("cpu"))
    assert norm == gradient.norm() and torch.allclose(table.weight.grad.to_dense(), gradient * 0.5 / (norm + 1e-6))
    with mock.patch.object(dist, "all_reduce") as reduce:
        reduce_tied(SimpleNamespace(module=tied, optimizer=None, using_bf16_optimizer=False))
    assert reduce.call_args.args[0] is table.weight.grad and table.weight.grad.layout == torch.strided
