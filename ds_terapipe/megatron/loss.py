"""Losses: of a language model, as a sum over tokens, so that it can be computed slice by slice; of BERT; of classes."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor, distributed as dist
from torch.nn import functional as F

Labels = tuple[Tensor, Tensor]
PretrainingLabels = tuple[Tensor, Tensor, Tensor]


class TokenLoss:
    """Mean cross entropy over the tokens that the loss mask keeps.

    ``loss(outputs, labels) == token_sum(outputs, labels) / token_weight(labels)``, and ``token_sum`` of a sequence is the
    sum of its slices'. Logits are those of this process's part of the vocabulary under tensor parallelism.
    """

    def __call__(self, outputs: Tensor, labels: Labels) -> Tensor:
        """The loss of one micro-batch.

        Args:
            outputs: logits [s, b, vocabulary / tensor parallel size].
            labels: (labels [b, s] int64, loss mask [b, s] float).

        Returns:
            A scalar, in fp32 or, for fp64 logits, fp64.
        """
        return self.token_sum(outputs, labels) / self.token_weight(labels)

    def token_weight(self, labels: Labels) -> Tensor:
        """Return the divisor of the sum over tokens, from a whole micro-batch: the tokens that count, at least 1."""
        return labels[1].float().sum().clamp(min=1.0)

    def token_sum(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Masked sum of the cross entropies of a slice or of a sequence; shapes as above."""
        targets, mask = labels
        losses = vocab_parallel_cross_entropy(outputs, targets.transpose(0, 1))
        return (losses * mask.transpose(0, 1)).sum()


class PretrainingLoss:
    """BERT's: mean cross entropy over the masked tokens, plus that of whether the second sentence follows the first.

    As Megatron-LM's ``pretrain_bert.py`` adds them up. Under tensor parallelism logits are those of this process's part of the
    vocabulary.
    """

    def __init__(self) -> None:
        self.tokens = TokenLoss()

    def __call__(self, outputs: tuple[Tensor, Tensor], labels: PretrainingLabels) -> Tensor:
        """The loss of one micro-batch.

        Args:
            outputs: (logits [s, b, vocabulary / tensor parallel size], logits of the order [b, 2]).
            labels: (labels [b, s] int64, of any value where the mask is 0; loss mask [b, s]; order [b] int64, 1 where the second
                sentence is not the next one).

        Returns:
            A scalar, in fp32 or, for fp64 logits, fp64.
        """
        logits, order_logits = outputs
        targets, mask, order = labels
        masked = self.tokens(logits, (targets.where(mask > 0, 0), mask))
        return masked + classification_loss(order_logits, order)


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of samples: logits [b, classes], labels [b] int64; in fp32 or, for fp64 logits, fp64."""
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels)


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each token, with the vocabulary spread over the tensor parallel group.

    megatron-core's own function rounds fp64 logits to fp32 and overwrites fp32 ones; this one leaves its input alone.

    Args:
        logits: [s, b, vocabulary / tensor parallel size].
        targets: [s, b], indices into the whole vocabulary.

    Returns:
        [s, b], in fp32 or, for fp64 logits, fp64.
    """
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    largest = logits.detach().amax(dim=-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits = logits - largest.unsqueeze(-1)

    local = targets - group.rank() * logits.shape[-1]
    mine = (local >= 0) & (local < logits.shape[-1])
    picked = logits.gather(-1, local.where(mine, 0).unsqueeze(-1)).squeeze(-1)
    picked = reduce_from_tensor_model_parallel_region(picked.where(mine, 0.0).contiguous(), group=group)
    total = reduce_from_tensor_model_parallel_region(logits.exp().sum(dim=-1).contiguous(), group=group)
    losses: Tensor = total.log() - picked
    return losses
