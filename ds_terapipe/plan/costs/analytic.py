"""Analytic cost of a slice, from operations, weight traffic, launches and links.

One layer, forward and backward, over l tokens of each of b sequences that have c tokens before them, on p tensor-parallel
devices (H hidden, N weights per layer, h heads of d; the nine rates are those of `hardware.Rates`):

    launch_s + max(6 b l N / (p flops), weight_passes 2 N / (p memory))
    + 12 b l (c + l) h d / (p attention_flops) + score_bytes b (h / p) l (c + l) / memory
    + 4 * 2 (p - 1) / p * 2 b l H / all_reduce_bytes_per_s

The full rectangle l x (c + l) is counted, as attention with materialised scores computes it. A third of the first two lines
is forward, half of the last. Short slices are bound by the weights' traffic or the launches, which is why there is a best
number of slices at all.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ds_terapipe.plan.costs.cost import Tokens
from ds_terapipe.plan.costs.hardware import Cluster, Model, Rates
from ds_terapipe.schedule import Placement

# Adam in mixed precision: fp32 weight and two moments read and written, gradient read, 16-bit weight written, and what unscaling
# and clearing the gradient take. Bytes per parameter.
OPTIMIZER_BYTES = 36.0
# Logits, their fp32 copy and softmax: written and read once each forward and backward. Bytes per logit.
_LOSS_BYTES = 24.0
# A looked-up row is read and written forward; backward reads its gradient and reads and writes the table's. In hidden states.
_EMBEDDING_PASSES = 5.0
_HALF = 2.0  # bytes of a 16-bit number


@dataclasses.dataclass(frozen=True)
class AnalyticCost:
    """A `cost.Cost`: seconds of each stage and boundary, for slices of ``sequences`` sequences at once.

    Attributes:
        model: its layers, and with a vocabulary also embedding (first stage), head and loss (last stage).
        cluster: memory bandwidth, and devices that share a network card.
        rates: the nine parameters; ``cluster.rates`` without calibration.
        layers: number of Transformer layers of each stage.
        tensor_parallel: devices that share each layer.
        sequences: sequences in a micro-batch.
        blocking_messages: a stage stands still while a message travels, as in the reference implementation of TeraPipe.
            `message` is then 0 and each stage is charged one message per direction, the first and last as well: the
            paper's closed form has equal stages.
        weights_apart: weight gradients are made once per micro-batch by `weights` and not by each backward.
        token_shares: devices that share the tokens of a message, with sequence parallelism.
        max_length: longest sequence; the formula itself has no bound.
    """

    model: Model
    cluster: Cluster
    rates: Rates
    layers: tuple[int, ...]
    tensor_parallel: int = 1
    sequences: int = 1
    blocking_messages: bool = False
    weights_apart: bool = False
    token_shares: int = 1
    max_length: int = 1 << 20

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.layers)

    def forward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        """Seconds that ``stage`` takes to run ``length`` tokens forward after ``context`` tokens of their sequences."""
        matrices = self._matrices(stage, length, 1 / 3, 1 / 6 if self.weights_apart else 1 / 3)
        return matrices + self._attention(stage, length, context) / 3 + self._others(stage, length) / 2

    def backward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        """Seconds that ``stage`` takes to run them backward, without weight gradients where those are made apart."""
        share, passes = (1 / 3, 1 / 6) if self.weights_apart else (2 / 3, 2 / 3)
        matrices = self._matrices(stage, length, share, passes, launches=2 / 3)
        return matrices + self._attention(stage, length, context) * 2 / 3 + self._others(stage, length) / 2

    def weights(self, stage: int, length: Tokens) -> Tokens:
        """Seconds that ``stage`` takes for the weight gradients of ``length`` tokens; 0 where each backward makes them."""
        if not self.weights_apart:
            return 0.0 * length
        # Its launches stay counted with the backward: one per layer and micro-batch is nothing beside one per slice.
        return self._matrices(stage, length, 1 / 3, 4 / 6, launches=0.0)

    def message(self, boundary: int, length: Tokens) -> Tokens:
        """Seconds that ``length`` tokens travel over a boundary, one direction; 0 where the stages stand still for them."""
        return 0.0 * length if self.blocking_messages else self._transfer(length)

    def step_overhead(
        self, data_parallel: int = 1, within_node: bool = False, placement: Placement | None = None
    ) -> float:
        """Seconds after the last backward: all-reduce of the gradients over the replicas, and the optimiser's pass.

        Args:
            data_parallel: replicas.
            within_node: whether those of a stage are on one node.
            placement: of the stages; None: one on each place.
        """
        where = Placement.plain(self.stages) if placement is None else placement
        trained = ([s for s in where.stages_on(place) if where.goes_backward(s)] for place in range(where.places))
        parameters = max(sum(map(self._stage_weights, stages)) for stages in trained)
        ring = 2 * (data_parallel - 1) / data_parallel * parameters * _HALF
        memory = self.cluster.memory_gb_per_s * 1e9
        return ring * self.gradient_byte_s(within_node) + OPTIMIZER_BYTES * parameters / memory

    def gradient_byte_s(self, within_node: bool) -> float:
        """Seconds of a byte in an all-reduce over the node's links, or over its network, which all of its devices share."""
        if within_node:
            return 1 / self.rates.all_reduce_bytes_per_s
        return self.cluster.devices_per_node / self.rates.gradient_bytes_per_s

    def _stage_weights(self, stage: int) -> float:
        """Weights of the matrices on one device of a stage."""
        head = self.model.hidden_size * self.model.vocab_size if stage == self.stages - 1 else 0
        return (self.layers[stage] * self.model.layer_parameters + head) / self.tensor_parallel

    def _matrices(
        self, stage: int, length: Tokens, share: float, passes: float, launches: float | None = None
    ) -> Tokens:
        """The layers' matrices and launches and, on the last stage, the head's: a share of operations and of passes."""
        rates = self.rates
        weights = self._stage_weights(stage)
        products = length * (share * 6 * self.sequences * weights / rates.flops)
        traffic = passes * rates.weight_passes * _HALF * weights / (self.cluster.memory_gb_per_s * 1e9)
        fixed = self.layers[stage] * rates.launch_s * (share if launches is None else launches)
        longer: Tokens = np.maximum(products, traffic)
        return longer + fixed

    def _attention(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        """The scores' products and traffic, forward and backward."""
        model, rates = self.model, self.rates
        per_score = 12 * model.attention_size / rates.attention_flops
        per_score += rates.score_bytes * model.num_attention_heads / (self.cluster.memory_gb_per_s * 1e9)
        scale = self.layers[stage] * self.sequences / self.tensor_parallel * per_score
        return length * (context + length) * scale

    def _others(self, stage: int, length: Tokens) -> Tokens:
        """Return a slice's seconds beside matrix products: all-reduces, embedding, loss, messages waited for."""
        model, p = self.model, self.tensor_parallel
        states = self.sequences * model.hidden_size * _HALF
        per_token = self.layers[stage] * 4 * 2 * (p - 1) / p * states / self.rates.all_reduce_bytes_per_s
        memory = self.cluster.memory_gb_per_s * 1e9
        if model.vocab_size and stage == 0:
            per_token += _EMBEDDING_PASSES * states / memory
        if stage == self.stages - 1:
            per_token += _LOSS_BYTES * self.sequences * model.vocab_size / p / memory
        seconds = length * per_token
        return seconds + 2 * self._transfer(length) if self.blocking_messages else seconds

    def _transfer(self, length: Tokens) -> Tokens:
        states = self.sequences * self.model.hidden_size * _HALF / self.token_shares
        return length * (states / self.rates.message_bytes_per_s) + self.rates.latency_s
