"""One run of the large-batch benchmark: a BERT of 2 layers x 128, masked language modelling on the sources of Python's library.

A sample is 64 bytes that follow one another in one file. As in BERT, 15 % of the positions (10 of 64) must be
predicted: of these 80 % show [MASK], 10 % another byte and 10 % the byte itself.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
import time
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.models import decay_groups

SEQUENCE, PREDICTED, MASK, VOCABULARY = 64, 10, 256, 257
HELD_OUT = 16  # one file in so many
MICRO_BATCH = 64  # samples of a forward pass: the activations of so many stay in the cache
VALIDATION_SEED, VALIDATION_SAMPLES = 1_000_003, 4096
# A feed-forward layer of twice the width, where BERT has four times, saves a quarter of the time.
LAYERS, HIDDEN, HEADS, FEED_FORWARD = 2, 128, 2, 256
WARMUP = 0.1


class Run(NamedTuple):
    """``samples`` samples in steps of ``batch``; the LR climbs to ``lr`` in the first tenth of the steps and falls to
    zero."""

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
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for path in sorted(top.rglob("*.py")):
        name = path.relative_to(top)
        if skipped.intersection(name.parts):
            continue
        content = path.read_bytes()
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


class BidirectionalAttention(nn.Module):
    """Megatron-core's ``core_attention`` without a mask; its own asks for a buffer on a CUDA device."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **unused: Any) -> Tensor:
        """[s, b, heads, d] each, to [s, b, heads * d]."""
        heads = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        return F.scaled_dot_product_attention(*heads).permute(2, 0, 1, 3).flatten(2)


def make_model(seed: int) -> Any:
    """Megatron-core's BERT without dropout, embeddings and output weights shared, on one rank.

    Rotary positions: with learned ones the 200 steps at batch 512 are over before the model has found out which bytes
    are neighbours.
    """
    from megatron.core import parallel_state
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
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
        layer.self_attention.core_attention = BidirectionalAttention()
    return model


def masked_loss(model: Any, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over the masked positions: ``BertModel.forward`` with a head that sees those alone, a sixth
    of all."""
    from ds_terapipe.megatron.attention import rotary_embedding

    angles = rotary_embedding(model.rotary_pos_emb, 0, SEQUENCE, tokens.device)
    hidden = model.embedding(input_ids=tokens, position_ids=model.bert_position_ids(tokens))
    hidden = model.encoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)
    masked = model.lm_head(hidden.transpose(0, 1).flatten(0, 1)[positions]).unsqueeze(1)
    logits, _ = model.output_layer(masked, weight=model.shared_embedding_or_output_weight())
    return F.cross_entropy(logits.squeeze(1), labels)


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The package's LAMB as it comes, every tensor adapted, or PyTorch's AdamW."""
    from ds_terapipe.optim.lamb import FusedLamb

    kind = FusedLamb if name == "lamb" else partial(torch.optim.AdamW, fused=True)
    return kind(decay_groups(model.parameters()), lr=lr, betas=(0.9, 0.999), eps=1e-6)


def share_of_peak(step: int, steps: int) -> float:
    """The LR of step 0, 1, ... ``steps`` - 1 as a share of the highest. Linear up, linear down."""
    climb = max(1, round(WARMUP * steps))
    return (step + 1) / climb if step < climb else (steps - step) / (steps - climb + 1)


def train(rank: int, world: int, run: Run) -> tuple[float | None, float]:
    """Validation loss in nats, None where the run left the finite numbers; seconds."""
    torch.set_num_threads(1)
    start, corpus, model = time.perf_counter(), load_corpus(), make_model(run.seed)
    optimizer, steps = make_optimizer(run.optimizer, model, run.lr), run.samples // run.batch
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
            return None, time.perf_counter() - start
    loss = validation_loss(model, corpus.validation, min(VALIDATION_SAMPLES, run.samples))
    return loss if math.isfinite(loss) else None, time.perf_counter() - start


@torch.no_grad()
def validation_loss(model: nn.Module, text: Tensor, count: int) -> float:
    """Mean cross entropy over the same masked samples of the held-out files for every run."""
    count = min(count, len(text)) // MICRO_BATCH * MICRO_BATCH
    samples = MaskedSamples(text, count, VALIDATION_SEED)
    losses = [masked_loss(model, *samples.batch(first, MICRO_BATCH)).item() for first in range(0, count, MICRO_BATCH)]
    return sum(losses) / len(losses)
