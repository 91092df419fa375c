"""The loss of a causal language model, from labels as Hugging Face has them: those of the tokens themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_terapipe.errors import ConfigError

IGNORED = -100
NO_STEP = (
    'mean_over: got "step", must be "micro_batch" under DeepSpeed\'s own engine, which does not know the labels of a whole '
    'step, use "token_pipeline" or mean_over="micro_batch"'
)


class CausalLMLoss:
    """Cross entropy of each token's logits with the label of the next one; labels of -100 count nothing.

    As transformers' ``ForCausalLMLoss``, in fp32, but 0 where no label counts. It is a sum over labels, made slice by slice.

    Args:
        mean_over: ``"micro_batch"``: each micro-batch's sum is divided by its own labels, as without a Trainer; ``"step"``: by
            those of the whole step, all micro-batches and replicas, as in transformers' Trainer (``num_items_in_batch``).
    """

    def __init__(self, mean_over: str = "micro_batch") -> None:
        if mean_over not in ("micro_batch", "step"):
            raise ConfigError(f'mean_over: got "{mean_over}", must be "micro_batch" or "step", use "micro_batch"')
        self.mean_over = mean_over
        self._labels_per_micro_batch: Tensor | None = None

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of a micro-batch, a scalar: logits [b, S, vocabulary], labels [b, S] int64."""
        following = self.aligned(labels)
        return self.token_sum(outputs, following) / self.token_weight(following)

    def aligned(self, labels: Tensor) -> Tensor:
        """Return [b, S], the target of each token: the label of the next one."""
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED)

    def token_sum(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Sum over the tokens of a slice or of a sequence; labels are aligned."""
        return F.cross_entropy(outputs.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")

    def token_weight(self, labels: Tensor) -> Tensor:
        """The denominator, from the aligned labels of a whole micro-batch."""
        if self.mean_over == "micro_batch":
            return _counted(labels).clamp(min=1)
        if self._labels_per_micro_batch is None:
            raise ConfigError(NO_STEP)
        return self._labels_per_micro_batch

    def step_weight(self, labels: Sequence[Tensor]) -> Tensor | None:
        """Labels that count, the mean of a replica's micro-batches of a step, from the labels [b, S] of each.

        The mean of sums that are all divided by the mean number of labels is the sum of all over the number of all.
        """
        if self.mean_over == "micro_batch":
            return None
        return torch.stack([_counted(self.aligned(one)) for one in labels]).float().mean()

    def begin_step(self, weight: Tensor) -> None:
        """Begin a step with ``weight``, the mean over all replicas."""
        self._labels_per_micro_batch = weight.clamp(min=1e-6)  # where none counts the sums are 0


def _counted(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()
