"""A dataset that notes who was asked for what, which samples a step must train; policies for the length of a test."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_terapipe.elastic.policies import freeze
from tests.pipeline.models import VOCABULARY

LENGTH = 16


class Texts:
    """Samples ((tokens, positions), targets), each [length], as last set.

    ``asked``, ``lengths`` and ``drawn``: indices as they were read, with the length then, and a draw for each.
    """

    def __init__(self, samples: int, seed: int = 7) -> None:
        random = torch.Generator().manual_seed(seed)
        self._texts = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=random)
        self.length = LENGTH
        self.asked: list[int] = []
        self.lengths: list[int] = []
        self.drawn: list[float] = []

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        self.asked.append(int(index))
        self.lengths.append(self.length)
        self.drawn.append(float(torch.rand(())))  # of a mask, say
        return self.sample(int(index))

    def sample(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The sample of an index, which is not noted."""
        text = self._texts[index][: self.length + 1]
        return (text[:-1], torch.arange(self.length)), text[1:]

    def set_seq_length(self, length: int) -> None:
        """Have samples of this length, at most 16."""
        self.length = length

    def take(self) -> list[int]:
        """Indices that were asked for since the last call."""
        taken, self.asked = self.asked, []
        return taken


def micro_batch_of(data: Texts, indices: list[int]) -> Any:
    """Samples as a micro-batch: ((tokens, positions), targets), each [b, length]."""
    rows = [data.sample(index) for index in indices]
    tokens, positions = (torch.stack([inputs[n] for inputs, _ in rows]) for n in (0, 1))
    return (tokens, positions), torch.stack([targets for _, targets in rows])


def in_order(steps: int, batch: int, samples: int) -> list[list[int]]:
    """The samples of every step, of a dataset that is read again and again from the first on."""
    return [[position % samples for position in range(t * batch, (t + 1) * batch)] for t in range(steps)]


@contextlib.contextmanager
def registered(name: str, cls: type[freeze.FreezePolicy]) -> Iterator[None]:
    with mock.patch.dict(freeze._POLICIES):
        freeze.register_policy(name, cls)
        yield
