"""Every way in which a model calls attention: trained and evaluated in slices, it is the model it was."""

from functools import partial

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.inspection.sequence_dims import probe_spans
from ds_terapipe.pipeline.operators.context import PlacementError, SliceContext
from ds_terapipe.pipeline.slicing import Span
from ds_terapipe.schedule import Unit
from tests.pipeline.attention_layers import WAYS, Attention, attend, way, without_flag
from tests.pipeline.models import HIDDEN, Embedding, Head, Plain, mean_loss, micro_batch
from tests.pipeline.training import build_engine, train, train_plain, worst
from tests.spawn import launched

SLICES = {"slices": [7, 2, 9, 1, 5]}
STEPS = [[micro_batch(10 * step + m, masked=False) for m in range(2)] for step in range(2)]


def specs(layer: type) -> list[LayerSpec]:
    return [LayerSpec(kind) for kind in (Embedding, layer, layer, Head)]


def every_way(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    """For each way: by how much losses, gradients, weights and the evaluation differ from one process, unsliced."""
    result = {}
    for name, (layer, options) in WAYS.items():
        how = {"stages": 1, "dtype": torch.float64, **options}
        engine = build_engine(specs(layer), mean_loss, token_pipeline=SLICES, **how)
        got = train(engine, STEPS)
        expected = train_plain(specs(layer), mean_loss, STEPS, dtype=torch.float64)
        loss = float(engine.eval_batch(iter(STEPS[0])))
        with torch.inference_mode():
            inference = float(engine.eval_batch(iter(STEPS[0])))
        engine.destroy()
        model = Plain(specs(layer)).double().eval()
        model.load_state_dict(expected.weights)
        with torch.no_grad():
            evaluated = sum(float(mean_loss(model(x), y)) for x, y in STEPS[0]) / 2
        result[name] = {
            "losses": max(abs(a / b - 1) for a, b in zip(got.losses, expected.losses, strict=True)),
            "gradients": max(worst(a, b) for a, b in zip(got.gradients, expected.gradients, strict=True)),
            "weights": worst(got.weights, expected.weights),
            "evaluation": abs(loss / evaluated - 1) / 1e4,  # DeepSpeed reduces evaluation losses in fp32
            "inference": abs(inference / evaluated - 1) / 1e4,
        }
    return result


def refused(rank: int, world_size: int) -> dict[str, str]:
    said = {}

    def attempt(name, layers, hook=None, slices=SLICES, **options):
        try:
            engine = build_engine(layers, mean_loss, token_pipeline=slices, stages=1, **options)
            if hook is not None:
                engine.module.register_forward_pre_hook(hook)
            engine.train_batch(iter(STEPS[0]))
            said[name] = "trained"
        except (ConfigError, RuntimeError) as error:
            said[name] = f"{type(error).__name__} {error}"

    inside = way(torch.compile(attend, backend="aot_eager", dynamic=True))
    for length in (1, 9, 11):  # graphs for any length are there before the engine is
        warm = partial(inside(), torch.randn(2, length, HIDDEN))
        warm().sum().backward()
        with torch.no_grad():
            warm()
    attempt("compiled function", specs(inside), slices={"slices": [7, 3, 9, 5]})
    outside = lambda module, inputs: (attend(*[torch.ones(2, 4, inputs[0][0].shape[1], 8)] * 3), None)[1]  # noqa: E731
    attempt("outside the layers", specs(Attention), hook=outside)
    narrow = lambda self, inputs: Embedding.forward(self, inputs if inputs[0].dtype == torch.int32 else inputs[2])  # noqa: E731
    cast = [LayerSpec(type("Narrow", (Embedding,), {"forward": narrow})), *specs(Attention)[1:]]
    attempt("cast", cast, hook=lambda module, inputs: ((inputs[0][0].int(), inputs[0][1]),))
    reentrant = {"config": {"pipeline": {"use_reentrant": True}}, "module": {"activation_checkpoint_interval": 1}}
    attempt("reentrant", specs(Attention), slices={"slices": 1}, **reentrant)  # cut or not
    reentrant["module"]["activation_checkpoint_func"] = partial(checkpoint, use_reentrant=False)
    attempt("own checkpoint", specs(Attention), module=reentrant["module"])
    return said


alone = launched([every_way, refused], 1)


@pytest.mark.parametrize("name", WAYS)
def test_trains_and_evaluates_as_the_whole_sequence(name, alone):
    ((ways, _),) = alone
    assert max(ways[name].values()) <= 1e-10, ways[name]


def test_what_cannot_be_placed_is_refused_before_the_first_step(alone):
    ((_, said),) = alone
    assert "attention is compiled by torch.compile (layer 1 (" in said["compiled function"]
    assert "), micro-batch 0, tokens 0 to" in said["compiled function"]
    assert "run on a slice it fails, PlacementError: causal attention is called outside the layers" in said["outside the layers"]
    assert '"use_reentrant": false' in said["reentrant"] and said["own checkpoint"] == said["cast"] == "trained"


def rows(length: int, seed: int = 0, **options) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, length, 8, generator=random).requires_grad_(**options) for _ in range(3)]


def run(context: SliceContext, span: Span, *calls) -> list[torch.Tensor]:
    with context.forward(Unit(3, 0), span):
        context.enter_layer(5)
        return [call() for call in calls]


def calls_of(context, span, *calls):
    """Run a slice of a layer that makes these calls, each with queries, keys and values of its own."""
    return run(context, span, *(partial(call, *rows(span.length)) for call in calls))


# calls of a slice that passes, calls of the next one, which does not, and what that one says
MISPLACED = [
    ([attend], [attend] * 2, "layer 5: attention call 1 of micro-batch 3 has no keys for tokens 0 to 4"),
    ([attend] * 2, [attend], r"layer 5: its attention call 1 is made for some slices .*\(tokens 4 to 8\)"),
]


@pytest.mark.parametrize(("before", "calls", "text"), MISPLACED)
def test_a_call_that_cannot_be_placed_is_an_error(context, before, calls, text):
    calls_of(context, Span(0, 4, 8), *before)
    with pytest.raises(PlacementError, match=text):
        calls_of(context, Span(4, 8, 8), *calls)


def with_mask(q, k, v, flag=False):
    return sdpa(q, k, v, attn_mask=torch.ones(q.shape[-2], 8, dtype=torch.bool), is_causal=flag)


# the calls of a layer; one more, of one token, without a mask or flag, comes behind the first of them
NEVER_CAUSAL = {
    "a layer that was not looked at": (),
    "a call too many": (without_flag,),
    "a masked call": (without_flag, with_mask),
    "a call of heads of another size": (without_flag, lambda q, k, v: without_flag(q, k, v[..., :4])),
} | ({"a mask beside the flag": (without_flag, partial(with_mask, flag=True))} if torch.__version__ >= "2.13" else {})


@pytest.mark.parametrize("name", NEVER_CAUSAL)
@pytest.mark.parametrize("first", [True, False])
def test_one_token_without_a_flag_is_refused_where_more_tokens_did_not_have_it(context, name, first):
    calls = NEVER_CAUSAL[name]
    for span in probe_spans(8):  # an engine looks at a layer before the first step
        calls_of(context, span, *calls)
    context.clear()
    for span in () if first else (Span(0, 4, 8), Span(4, 7, 8)):
        calls_of(context, span, *calls)
    with pytest.raises(ConfigError, match=r"attention that is not causal \(layer 5, micro-batch 3, tokens"):
        calls_of(context, Span(0, 1, 8) if first else Span(7, 8, 8), *calls[:1], sdpa)


def test_recomputation_of_a_step_that_overflowed_is_placed(context):
    overflowed = partial(checkpoint, lambda q, k, v: attend(q, k * float("nan"), v), use_reentrant=False)
    for span in (Span(0, 4, 8), Span(4, 8, 8)):
        (out,) = run(context, span, partial(overflowed, *rows(4)))
    with context.backward(Unit(3, 0), Span(4, 8, 8)):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_that_makes_other_keys_is_an_error(context, reentrant):
    options = {"use_reentrant": reentrant, "preserve_rng_state": False}
    noisy = partial(checkpoint, lambda q, k, v: attend(q, k * torch.rand(()), v), **options)
    outs = [run(context, span, partial(noisy, *rows(4))) for span in (Span(0, 4, 8), Span(4, 8, 8))]
    error = pytest.raises(PlacementError, match=r"deterministic.*preserve_rng_state")
    with context.backward(Unit(3, 0), Span(4, 8, 8)), error:
        outs[1][0].sum().backward()
