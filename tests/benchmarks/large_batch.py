"""LAMB and AdamW at growing batches on real text, the same number of samples at each.

``python -m tests.benchmarks.large_batch`` trains a BERT on the sources of Python's library, as docs/explanation/lamb.md says.
Tuning of the LR takes one seed and three values, at first: a best value at the edge of those tried has one more tried beyond
it, at most ``EXTENSIONS`` times. Then the best ones are run with the other seeds.

A sample is 64 bytes that follow one another in one file. As in BERT, 15 % of the positions (10 of 64) must be
predicted: of these 80 % show [MASK], 10 % another byte and 10 % the byte itself.

Each finished run is a line in the output folder; started again, the benchmark makes the missing ones.
"""

import hashlib
import math
import statistics
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_terapipe.commands.prepare_data import find_files
from tests.benchmarks import measure
from tests.benchmarks.measure import Lines
from tests.benchmarks.models import decay_groups

NAMES = {"lamb": "LAMB", "adamw": "AdamW"}
# The middle one of the LRs tried first, from runs of an eighth of the samples; neighbours differ by a factor of two.
CENTRES = {"lamb": {16: 8e-3, 128: 1.13e-2, 512: 2.26e-2}, "adamw": {16: 2e-3, 128: 2.83e-3, 512: 5.66e-3}}
EXTENSIONS, WARMUP = 2, 0.1
SEQUENCE, PREDICTED, MASK, VOCABULARY = 64, 10, 256, 257
HELD_OUT = 16  # one file in so many
MICRO_BATCH = 64  # samples of a forward pass: the activations of so many stay in the cache
VALIDATION_SEED, VALIDATION_SAMPLES = 1_000_003, 4096
# A feed-forward layer of twice the width, where BERT has four times, saves a quarter of the time.
LAYERS, HIDDEN, HEADS, FEED_FORWARD = 2, 128, 2, 256


class Run(NamedTuple):
    """``samples`` samples in steps of ``batch``; the LR climbs to ``lr`` in the first tenth of the steps and falls to zero."""

    optimizer: str
    batch: int
    lr: float
    seed: int
    samples: int


class Corpus(NamedTuple):
    """Samples [n, 64] of bytes, of the files to train on and of those held out, and a hash of all text."""

    training: Tensor
    validation: Tensor
    digest: str


@cache
def load_corpus() -> Corpus:
    """The running Python's standard library, split by file name."""
    top, parts, digest = Path(sysconfig.get_paths()["stdlib"]), ([], []), hashlib.sha256()
    for path in find_files(None, None):
        name, content = path.relative_to(top), path.read_bytes()
        digest.update(content)
        number = int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:4], "big")
        parts[number % HELD_OUT == 0].append(content[: len(content) // SEQUENCE * SEQUENCE])
    whole = (torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8) for files in parts)
    return Corpus(*(text.view(-1, SEQUENCE) for text in whole), digest.hexdigest()[:16])


class MaskedSamples:
    """``count`` samples in an order, and with masks, that depend on ``seed`` alone and not on the size of the batches.

    With more samples than ``text`` has, the text is seen again under other masks.
    """

    def __init__(self, text: Tensor, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        passes = -(-count // len(text))
        order = torch.cat([torch.randperm(len(text), generator=generator) for _ in range(passes)])[:count]
        self._bytes = text[order]
        self._places = torch.rand(count, SEQUENCE, generator=generator).topk(PREDICTED, dim=1).indices
        what = torch.rand(count, PREDICTED, generator=generator)
        self._labels = self._bytes.gather(1, self._places).long()
        other = torch.randint(256, (count, PREDICTED), generator=generator)
        self._shown = torch.where(what < 0.8, MASK, torch.where(what < 0.9, other, self._labels))

    def batch(self, start: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [size, 64] as the model sees them; the places to predict, as indices into all of them; their bytes."""
        part = slice(start, start + size)
        places = self._places[part]
        tokens = self._bytes[part].long().scatter(1, places, self._shown[part])
        return tokens, (places + torch.arange(size).unsqueeze(1) * SEQUENCE).flatten(), self._labels[part].flatten()


def make_model(seed: int) -> Any:
    """Megatron-core's BERT without dropout, embeddings and output weights shared, on one rank.

    Rotary positions: with learned ones the 200 steps at batch 512 are over before the model has found out which bytes
    are neighbours.
    """
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ds_terapipe.megatron.attention import BidirectionalAttention
    from ds_terapipe.megatron.parallel import initialize_parallel

    initialize_parallel()
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=FEED_FORWARD,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        init_method_std=(2 / (5 * HIDDEN)) ** 0.5,  # 0.02 at the width of BERT-large
    )  # fmt: skip
    model = BertModel(
        config, num_tokentypes=0, transformer_layer_spec=bert_layer_local_spec, vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE, share_embeddings_and_output_weights=True, add_binary_head=False,
        position_embedding_type="rope",
    )  # fmt: skip
    for layer in model.encoder.layers:
        # megatron-core's own asks for a buffer on a CUDA device
        layer.self_attention.core_attention = BidirectionalAttention(config, 1, AttnMaskType.padding, "self")
    return model


def masked_loss(model: Any, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over the masked positions: ``BertModel.forward`` with a head that sees those alone, a sixth of all."""
    from ds_terapipe.megatron.attention import rotary_embedding

    angles = rotary_embedding(model.rotary_pos_emb, 0, SEQUENCE, tokens.device)
    hidden = model.embedding(input_ids=tokens, position_ids=model.bert_position_ids(tokens))
    hidden = model.encoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)
    masked = model.lm_head(hidden.transpose(0, 1).flatten(0, 1)[positions]).unsqueeze(1)
    logits, _ = model.output_layer(masked, weight=model.shared_embedding_or_output_weight())
    return F.cross_entropy(logits.squeeze(1), labels)


def share_of_peak(step: int, steps: int) -> float:
    """The LR of step 0, 1, ... ``steps`` - 1 as a share of the highest. Linear up, linear down."""
    climb = max(1, round(WARMUP * steps))
    return (step + 1) / climb if step < climb else (steps - step) / (steps - climb + 1)


def train(run: Run) -> dict[str, float | None]:
    """Validation loss in nats, None where the run left the finite numbers. LAMB is the package's as it comes."""
    from ds_terapipe.optim.lamb import FusedLamb

    corpus, model, steps = load_corpus(), make_model(run.seed), run.samples // run.batch
    settings: dict[str, Any] = {"lr": run.lr, "betas": (0.9, 0.999), "eps": 1e-6}
    groups = decay_groups(model.parameters())
    is_lamb = run.optimizer == "lamb"
    optimizer = FusedLamb(groups, **settings) if is_lamb else torch.optim.AdamW(groups, fused=True, **settings)
    samples = MaskedSamples(corpus.training, steps * run.batch, run.seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = run.lr * share_of_peak(step, steps)
        total = 0.0
        for first in range(0, run.batch, MICRO_BATCH):
            size = min(MICRO_BATCH, run.batch - first)
            loss = masked_loss(model, *samples.batch(step * run.batch + first, size)) * (size / run.batch)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(total):
            return {"loss": None}
    count = min(VALIDATION_SAMPLES, run.samples, len(corpus.validation)) // MICRO_BATCH * MICRO_BATCH
    samples = MaskedSamples(corpus.validation, count, VALIDATION_SEED)  # the same for every run
    with torch.no_grad():
        loss = statistics.fmean(float(masked_loss(model, *samples.batch(at, MICRO_BATCH))) for at in range(0, count, MICRO_BATCH))
    return {"loss": loss if math.isfinite(loss) else None}


Done = Mapping[Run, Mapping[str, Any]]  # a loss of None: it diverged


class Plan(NamedTuple):
    """Runs of the benchmark."""

    batches: Sequence[int] = (16, 128, 512)
    seeds: Sequence[int] = (0, 1, 2)
    samples: int = 102_400

    def run(self, optimizer: str, batch: int, lr: float, seed: int | None = None) -> Run:
        """LRs are rounded to three digits, so that the same one reached by two ways is one run."""
        return Run(optimizer, batch, float(f"{lr:.3g}"), self.seeds[0] if seed is None else seed, self.samples)


def loss_of(done: Done, run: Run) -> float:
    loss = done[run]["loss"]
    return math.inf if loss is None else loss


def tuning(plan: Plan, optimizer: str, batch: int, done: Done) -> tuple[Run | None, list[Run]]:
    """The best run of the tuning at ``batch``, None until that is known, and the runs that are still to be made."""
    low, high, centre = -1, 1, CENTRES[optimizer][batch]
    while True:
        candidates = [plan.run(optimizer, batch, centre * 2.0**power) for power in range(low, high + 1)]
        if missing := [run for run in candidates if run not in done]:
            return None, missing
        best = min(candidates, key=partial(loss_of, done))
        inside = best not in (candidates[0], candidates[-1])
        if inside or high - low >= 2 + EXTENSIONS or math.isinf(loss_of(done, best)):
            return best, []
        low, high = low - (best == candidates[0]), high + (best == candidates[-1])


def rows(plan: Plan, done: Done) -> dict[str, dict[int, list[Run]]]:
    """The rows of the table: the runs of all seeds at every batch, none where the LR is not known yet."""
    found: dict[str, dict[int, list[Run]]] = {}
    for rule in ("tuned at every batch", "square-root rule"):
        for optimizer, name in NAMES.items():
            cells = found[f"{name}, {rule}"] = {}
            for batch in plan.batches:
                like = batch if rule.startswith("tuned") else plan.batches[0]
                best, _ = tuning(plan, optimizer, like, done)
                rate = best and best.lr * math.sqrt(batch / like)
                cells[batch] = [plan.run(optimizer, batch, rate, seed) for seed in plan.seeds] if rate else []
    return found


def needed(plan: Plan, done: Done) -> list[Run]:
    """The runs that are known to be missing, in the order they should be made: a whole table with one seed, then with two."""
    wanted = [run for name in NAMES for batch in plan.batches for run in tuning(plan, name, batch, done)[1]]
    known = [runs for cells in rows(plan, done).values() for runs in cells.values() if runs]
    wanted += [runs[number] for number in range(len(plan.seeds)) for runs in known]
    return [run for run in dict.fromkeys(wanted) if run not in done]


def report(plan: Plan, done: Done) -> list[str]:
    """Markdown: validation loss in nats, mean and standard deviation over the seeds; then LAMB against AdamW."""
    heads = "".join(f" batch {batch}, {plan.samples // batch} steps |" for batch in plan.batches)
    lines = [f"| |{heads}", "|---" * (len(plan.batches) + 1) + "|"]
    means: dict[tuple[str, int], tuple[float, float]] = {}
    for title, row in rows(plan, done).items():
        for batch, runs in row.items():
            values = [loss_of(done, run) for run in runs]
            mean = statistics.fmean(values)
            means[title, batch] = mean, measure.spread(values) if math.isfinite(mean) else 0.0
        lines.append(f"| {title} | {' | '.join('{:.3f} ± {:.3f}'.format(*means[title, batch]) for batch in row)} |")
    for (title, batch), (mean, deviation) in means.items():
        if title.startswith("LAMB"):
            other, spread = means[title.replace("LAMB", "AdamW"), batch]
            error = math.sqrt((deviation**2 + spread**2) / len(plan.seeds))
            difference = f"{mean - other:+.3f}, twice its standard error {2 * error:.3f}"
            lines.append(f"- batch {batch}, {title} beside AdamW: {difference}")
    return lines


def main() -> None:
    options = measure.parser("large_batch", __doc__)
    add, ints = options.add_argument, measure.listed(int)
    add("--folder", type=Path, default=Path("runs/large_batch"), help="of the finished runs")
    add("--jobs", type=int, default=1, help="runs at a time (default 1)")
    add("--batches", type=ints, default=[16, 128, 512], help="some of 16,128,512 (default all)")
    add("--seeds", type=ints, help="LRs are tuned with the first (default 0,1,2; 0 with --quick)")
    options = options.parse_args()
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    plan = Plan(options.batches, seeds, 512 if options.quick else 102_400)
    lines = Lines(options.folder / "runs.jsonl", Run, load_corpus().digest)
    make = partial(measure.on_ranks, train, ranks=1)
    print("\n".join(report(plan, measure.sweep(partial(needed, plan), make, lines, options.jobs))))


if __name__ == "__main__":
    main()
