"""Packed documents by their boundaries against a mask of tokens by tokens, in four slices on two stages.

``python -m tests.benchmarks.packed`` trains the same documents both ways and prints both times.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_terapipe.pipeline.documents import Documents
from tests.benchmarks import measure, models
from tests.benchmarks.token_pipeline import new_engine, token_slices

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
    workload = models.Workload(shape, 1)
    ((inputs, labels),) = workload.micro_batches()
    if way == WAYS[0]:
        inputs = (*inputs, (numbers[:, None, :, None] == numbers[:, None, None]).tril())
        engine = new_engine(2, workload, token_slices(4), first=MaskedEmbedding, block=Masked, last=MaskedHead)
    else:
        engine = new_engine(2, workload, token_slices(4))
        engine.module.documents_of = lambda inputs: Documents.of(numbers)
    return lambda: float(engine.train_batch(iter([(inputs, labels)])))


def main() -> None:
    options = measure.parser("packed", __doc__, rounds=3).parse_args()
    documents, shape = (QUICK, models.QUICK) if options.quick else (DOCUMENTS, SHAPE)
    columns = [measure.Column(way, partial(prepare, way, documents, shape)) for way in WAYS]
    result = measure.on_ranks(measure.side_by_side, columns, measure.settings_of(options), 1)
    measure.Report(options).add("packed", result, result.table(f"documents of {documents} tokens", WAYS[0]))


if __name__ == "__main__":
    main()
