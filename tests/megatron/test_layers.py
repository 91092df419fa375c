"""Attention, rotary positions, loss and process groups of the GPT pipeline, and what it refuses."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import ProcessTopology
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron import TokenLoss, destroy_parallel, gpt_pipeline, initialize_parallel, layers
from ds_terapipe.megatron.attention import CausalAttention
from ds_terapipe.megatron.parallel import adopt_topology
from ds_terapipe.pipeline.inspection import first_batch
from tests.megatron.common import Model, batches, build, whole_tensors
from tests.pipeline.training import build_engine, difference
from tests.spawn import Exit, in_background, launched, run_to_exit


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    initialize_parallel()
    yield
    destroy_parallel()
    dist.destroy_process_group()


def config(**changes: Any) -> TransformerConfig:
    settings = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True}
    return TransformerConfig(**{**settings, "hidden_dropout": 0.0, "attention_dropout": 0.0, **changes})


def attention(**changes: Any) -> CausalAttention:
    return CausalAttention(config(**changes), 1, AttnMaskType.causal, "self")


@pytest.mark.parametrize(("s", "groups"), [(6, 4), (2, 2), (4, 2), (6, 1)])  # also as many tokens as groups, or heads
def test_attention_is_causal_softmax_attention(s: int, groups: int) -> None:
    b, heads, d = 2, 4, 8
    q = torch.randn(s, b, heads, d, dtype=torch.float64)
    k, v = torch.randn(2, s, b, groups, d, dtype=torch.float64)
    turned = (t.repeat_interleave(heads // t.shape[2], dim=2).permute(1, 2, 0, 3) for t in (q, k, v))
    expected = F.scaled_dot_product_attention(*turned, is_causal=True).permute(2, 0, 1, 3).reshape(s, b, heads * d)
    torch.testing.assert_close(attention(num_query_groups=groups)(q, k, v), expected)


def test_attention_drops_out_while_training_only_and_refuses_what_is_not_causal() -> None:
    module, (q, k, v) = attention(attention_dropout=0.5), torch.randn(3, 6, 2, 4, 8)
    assert not torch.equal(module(q, k, v), module(q, k, v))
    assert torch.equal(module.eval()(q, k, v), module(q, k, v))
    with pytest.raises(ConfigError, match="must be plain causal attention"):
        module(q, k, v, torch.ones(1, 1, 6, 6).bool())
    with pytest.raises(ConfigError, match="must be causal self-attention"):
        CausalAttention(config(), 1, AttnMaskType.padding, "self")


def test_norms_of_queries_without_weights_are_of_one_length(alone: None) -> None:
    norm = layers.GPTLayer(config(qk_l2_norm=True), 1, None, seed=1).self_attention.q_layernorm
    assert not [*norm.parameters()] and (norm(torch.randn(5, 2, 4, 8)).square().mean(-1) - 1).abs().max() < 1e-2


def test_rotary_angles_are_megatron_core_s(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    for interleaved in (False, True):
        layer = layers.GPTLayer(config(rotary_interleaved=interleaved), 1, layers.Rotary(percent=0.5), seed=1)
        expected = layer.rotary.get_emb(7, 3)
        torch.testing.assert_close(layers.rotary_embedding(layer.rotary, 3, 7, torch.device("cpu")), expected)


def test_loss_is_the_masked_mean_adds_up_over_slices_and_leaves_logits_alone(alone: None) -> None:
    loss, logits = TokenLoss(), torch.randn(10, 2, 16, dtype=torch.float64, requires_grad=True)
    targets, mask = torch.randint(0, 16, (2, 10)), (torch.rand(2, 10) > 0.3).float()
    before, weight = logits.detach().clone(), loss.token_weight((targets, mask))
    wanted = (F.cross_entropy(logits.permute(1, 2, 0), targets, reduction="none") * mask).sum() / mask.sum()
    parts = [
        loss.token_sum(logits[start:stop], (targets[:, start:stop], mask[:, start:stop])) / weight
        for start, stop in ((0, 3), (3, 4), (4, 10))
    ]
    gradients = [torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (wanted, sum(parts))]
    torch.testing.assert_close((loss(logits, (targets, mask)), sum(parts)), (wanted, wanted))
    torch.testing.assert_close(*gradients)
    assert torch.equal(logits.detach(), before)
    empty = loss(logits.bfloat16(), (targets, torch.zeros_like(mask)))
    assert empty.dtype == torch.float32 and not empty.any(), "of a mask without tokens"


@pytest.mark.parametrize(("changes", "arguments", "message"), [
    ({"num_moe_experts": 2}, {}, "num_moe_experts: got 2, must be None"), ({"window_size": (8, 0)}, {}, "window_size"),
    ({"qk_clip": True}, {}, "qk_clip"), ({"account_for_loss_in_pipeline_split": True}, {}, "use the argument layers_per_stage"),
    ({"layernorm_zero_centered_gamma": True}, {}, "gamma"), ({"enable_autocast": True}, {}, "use DeepSpeed's torch_autocast"),
    ({"calculate_per_token_loss": True}, {}, "micro-batches"), ({"cuda_graph_impl": "local"}, {}, "several lengths"),
    ({"use_mup": True}, {}, "use_mup"),  # from 0.17 on
    ({"num_query_groups": 3}, {}, r"num_query_groups: got 3, must be a divisor of num_attention_heads \(4\), use e.g. 4"),
    ({"recompute_granularity": "selective"}, {}, "use DeepSpeed's activation checkpointing"),
    ({"tensor_model_parallel_size": 2}, {}, "tensor x pipeline parallel size: got 2 x 1 for 1 processes"),
    ({}, {"max_position_embeddings": 8}, "max_position_embeddings: got 8, must be at least seq_length, use 16"),
    ({}, {"position_embedding": "alibi"}, 'position_embedding: got "alibi"'),
])  # fmt: skip
def test_settings_that_are_not_followed_are_refused(alone: None, changes: Any, arguments: Any, message: str) -> None:
    wrong = config()
    vars(wrong).update(changes)
    with pytest.raises(ConfigError, match=message):
        gpt_pipeline(wrong, vocab_size=64, seq_length=16, num_stages=1, **arguments)


def test_first_weights_are_spread_as_those_of_megatron_core(alone: None) -> None:
    settings = config(init_method_std=0.1, embedding_init_method_std=0.7)
    ends = layers.Embedding(settings, 64, 16, 0), layers.FinalNorm(settings), layers.OutputHead(settings, 64, 3)
    ours = torch.nn.ModuleList([ends[0], *(layers.GPTLayer(settings, n, None, n) for n in (1, 2)), *ends[1:]])
    theirs = GPTModel(settings, get_gpt_layer_local_spec(), 64, 16)
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert mine.shape == other.shape and float(mine.std()) == pytest.approx(float(other.std()), rel=0.2), name


def dropped(rank: int, size: int) -> list[list[float]]:
    """Numbers that attention draws on two tensor-parallel ranks that are seeded differently, and those behind it."""
    one, other = (dict(build(Model(), tensor=2, seed=seed).named_parameters()) for seed in (1, 2))
    first, second = (f"{layer}.self_attention.linear_qkv.weight" for layer in (1, 2))
    assert min(difference(each, one[first]) for each in (one[second], other[first], other[second])) > 1.0
    torch.manual_seed(rank)  # as scripts may
    module = build(Model(modern=True), tensor=2)
    for layer in module.modules():
        layer.hidden_dropout = 0.3
    with pytest.raises(ConfigError, match="got none with sequence_parallel or qk_layernorm"):
        module.check_without_keys()
    engine = build_engine((), None, made=module, token_pipeline={"slices": 3}, micro_batches=2, batch=2)
    engine.train_batch(batches())
    whole_tensors(module)  # which finds copies that differ
    engine.destroy()
    torch.manual_seed(1)
    attend = next(each for each in module.modules() if isinstance(each, CausalAttention))
    attend.dropout = 0.5
    return [tensor.tolist() for tensor in (attend(*torch.ones(3, 4, 1, 2, 8)), torch.rand(3))]


ranks = launched(dropped, 2)


def test_ranks_drop_out_alike_but_for_the_heads_that_each_has_of_its_own(ranks: list[Any]) -> None:
    (heads, after), (others, others_after) = ranks
    assert heads != others and after == others_after


def mixing(rank: int, size: int) -> list[tuple[str, str]]:
    """Errors on each rank of a GPT in which only the second rank has a layer, or a loss, that mixes tokens."""
    kept, said = {}, []

    class KeptLoss(TokenLoss):
        def token_sum(self, logits: Any, labels: Any) -> Any:
            weight = self.token_weight(labels) if bf16 else 1e4  # adds up over slices, or does not
            return super().token_sum(logits, labels) + kept.get("mean", 0.0) * weight

    def gradients(module: Any, given: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient + 0.1 * gradient.sum())

    ways = {
        "differs by": lambda module, given, output: output + output.mean(0, keepdim=True),
        "the gradient of the input": gradients, "loss_fn: got": lambda module, given, output: kept.update(mean=output.mean()),
    }  # fmt: skip
    for number, (bf16, shares, message) in enumerate(itertools.product((False, True), (False, True), (*ways, ""))):
        module = build(Model(tied=number % 2 == 0, modern=bf16 != shares, sequence_parallel=shares), tensor=2)
        module.loss_fn = KeptLoss()
        if rank and message:
            next(each for each in module.modules() if isinstance(each, layers.GPTLayer)).register_forward_hook(ways[message])
        engine = build_engine((), None, made=module, token_pipeline={"slices": [4, 2, 10], "timeout_s": 20.0}, batch=2,
                              micro_batches=2, config={"bf16": {"enabled": bf16}})  # fmt: skip
        with nullcontext() if not message else pytest.raises(ConfigError) as raised:
            engine.train_batch(batches())
        said.append((message, str(raised.value) if message else ""))
        kept.clear()
        engine.destroy()
    return said


on_one_rank = launched(mixing, 2)


def test_tokens_that_one_tensor_parallel_rank_mixes_are_found_on_all(on_one_rank: list[Any]) -> None:
    for message, found in (each for of_rank in on_one_rank for each in of_rank):
        assert message in found and "timeout_s" not in found


def failing(rank: int, size: int, alone: bool) -> None:
    """A step of a GPT with a layer that fails on one of two tensor-parallel ranks, or on both."""
    first_batch._PATIENCE_S = 3.0
    module = build(Model(), tensor=2)
    if rank or not alone:
        attend = next(each for each in module.modules() if isinstance(each, CausalAttention))
        attend.register_forward_pre_hook(lambda *_: {}["bug"])
    build_engine((), None, made=module, token_pipeline={"slices": 2}, micro_batches=2, batch=2).train_batch(batches())


ends = in_background(f"{__name__}:ends", 2, lambda: [run_to_exit(failing, 2, alone, timeout=100) for alone in (True, False)])


def test_a_layer_that_fails_on_one_tensor_parallel_rank_ends_both(ends: list[list[Exit]]) -> None:
    (waiting, alone), both = ends
    assert "KeyError: 'bug'; this rank alone" in alone.output and "for the ranks that share its layers" in waiting.output
    assert all("inputs that the model fails with, cut or not, KeyError: 'bug'" in each.output for each in both)
    assert {each.code for each in (waiting, alone, *both)} == {1} and "timeout_s" not in both[0].output


def test_other_sizes_are_refused() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    with pytest.raises(ConfigError, match="must order the processes by pipe, data, model"):
        adopt_topology(ProcessTopology(axes=["model", "data", "pipe"], dims=[2, 1, 2]))
    assert [initialize_parallel(tensor=2, pipeline=2).get_dim("pipe") for _ in range(2)] == [2, 2]
    with pytest.raises(ConfigError, match=r"got 1 x 2, but megatron-core is set up for 2 x 2"):
        initialize_parallel(tensor=1, pipeline=2)
    destroy_parallel()
    assert len(dist.distributed_c10d._world.pg_map) == 1, "the job's own group"
    dist.destroy_process_group()
