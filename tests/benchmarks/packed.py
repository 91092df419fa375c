"""Packed documents by their boundaries against a mask of tokens by tokens, in four slices on two stages.

``python -m tests.benchmarks.packed`` trains the same documents both ways and prints both times.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor

from ds_terapipe.pipeline.documents import Documents
from tests.benchmarks import measure, models
from tests.benchmarks.token_pipeline import LEARNING_RATE, token_slices
from tests.pipeline.training import build_engine

DOCUMENTS, QUICK = (2600, 1100, 396), (70, 40, 18)
WAYS = ("a mask of tokens by tokens", "documents")
SHAPE = models.Shape(sequence=sum(DOCUMENTS))


class Masked(models.Block):
    """A block whose attention has a mask, which goes on to the next block: (hidden, mask [1, 1, s, S])."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = inputs
        self.attention = partial(F.scaled_dot_product_attention, attn_mask=mask)
        return super().forward(hidden), mask


class MaskedEmbedding(models.Embedding):
    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(inputs[:2]), inputs[2]


class MaskedHead(models.Head):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(inputs[0])


def prepare(way: str, documents: tuple[int, ...], shape: models.Shape) -> Callable[[], float | None]:
    """Steps of one way."""
    numbers = torch.repeat_interleave(torch.arange(1, len(documents) + 1), torch.tensor(documents))[None]
    (tokens, positions), labels = models.Workload(shape, 1).micro_batches()[0]
    masked = way == WAYS[0]
    kinds = [MaskedEmbedding, *[Masked] * shape.layers, MaskedHead] if masked else models.kinds(shape)
    layers = [LayerSpec(kind, shape, index) for index, kind in enumerate(kinds)]
    module = PipelineModule(layers, num_stages=2, loss_fn=models.TokenLoss(), partition_method="uniform")
    if not masked:
        module.documents_of = lambda inputs: Documents.of(numbers)
    keys, sgd = token_slices(4)["token_pipeline"], partial(torch.optim.SGD, lr=LEARNING_RATE)
    engine = build_engine((), None, made=module, token_pipeline=keys, micro_batches=1, batch=1, optimizer=sgd)
    mask = (numbers[:, None, :, None] == numbers[:, None, None]).tril()
    inputs = (tokens, positions, mask) if masked else (tokens, positions)
    return lambda: float(engine.train_batch(iter([(inputs, labels)])))


def run(settings: measure.Settings, documents: tuple[int, ...], shape: models.Shape, steps: int) -> measure.Result:
    """Both ways in one run."""
    columns = [measure.Column(way, partial(prepare, way, documents, shape)) for way in WAYS]
    return measure.side_by_side(columns, settings, steps)


def main() -> None:
    options = measure.parser("packed", __doc__, rounds=3).parse_args()
    documents = QUICK if options.quick else DOCUMENTS
    shape = models.QUICK if options.quick else SHAPE
    result = measure.on_ranks(run, measure.settings_of(options), documents, shape, 1)
    measure.Report(options).add("packed", result, result.table(f"documents of {documents} tokens", WAYS[0]))


if __name__ == "__main__":
    main()
