"""Analytic memory of a micro-batch on each stage, from the shapes of the model.

Counted for a layer of 16-bit numbers without recomputation, as in Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1): the
inputs of both norms, of query-key-value, of the attention's projection and of both MLP matrices, queries, keys and values, the
input of the activation function, and two dropout masks of a byte. For H hidden, T tensor-parallel devices and the standard
shape that is H (10 + 24 / T) bytes per token. The scores of attention are not kept: the engine's attention makes them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_terapipe.plan.costs.hardware import Model
from ds_terapipe.plan.costs.memory import MemoryModel, StageMemory

_HALF, _FULL = 2.0, 4.0  # bytes of a 16-bit and of a 32-bit number
# bytes per parameter: in 16 bit; Adam's weight and two moments in 32 (arXiv 1910.02054, 3.1)
WEIGHT, GRADIENT, OPTIMIZER = 2.0, 2.0, 12.0


def analytic_memory(
    model: Model,
    layers: Sequence[int],
    tensor_parallel: int = 1,
    sequences: int = 1,
    weights_once: bool = True,
    optimizer_shards: int | None = None,
    token_shares: int = 1,
    forward_only: int = 0,
) -> MemoryModel:
    """The memory of micro-batches of ``sequences`` sequences.

    Args:
        model: its layers; with a vocabulary also the logits and their 32-bit copy on the last stage.
        layers: number of Transformer layers of each stage.
        tensor_parallel: devices that share each layer.
        sequences: in a micro-batch.
        weights_once: weight gradients are made once per micro-batch; else they are summed in 32 bit.
        optimizer_shards: replicas that share the optimiser's state (ZeRO stage 1). None: weights, gradients and Adam's state
            are not counted.
        token_shares: devices that share the tokens between products, with Megatron's sequence parallelism (section 4.2.2).
        forward_only: so many stages, the first ones, are frozen: they have no gradients and no optimiser.
    """
    last = len(layers) - 1
    hidden, ffn = model.hidden_size, model.ffn_hidden_size or 4 * model.hidden_size
    attention = model.attention_size / tensor_parallel
    keys = 2 * attention * model.groups / model.num_attention_heads
    inner, gates = ffn / tensor_parallel, 2 if model.swiglu else 1
    # norms, inputs of the first matrix of attention and MLP; masks
    whole = (4 * hidden * _HALF + 2 * hidden) / token_shares
    states = hidden * _HALF / token_shares
    # queries, keys and values in one tensor; input of the projection; input of the activation function and of the last matrix
    shared = (2 * attention + keys + (gates + 1) * inner) * _HALF
    inputs = 2 * hidden / token_shares + attention + inner
    gradients = (attention + keys) + hidden + gates * inner + hidden
    logits = (_HALF + _FULL) * model.vocab_size / tensor_parallel
    stages = []
    kept = 0.0 if optimizer_shards is None else WEIGHT + GRADIENT + OPTIMIZER / optimizer_shards
    table, own = model.hidden_size * model.vocab_size, model.untie_embeddings_and_output_weights
    for stage, count in enumerate(layers):
        ends = (stage == 0) + (stage == last) if own else stage in (0, last)  # one stage alone has a tied table once
        parameters = (count * model.layer_parameters + table * ends) / tensor_parallel
        stages.append(
            StageMemory(
                activations=sequences * (count * (whole + shared) + (logits if stage == last else states)),
                keys_values=sequences * count * keys * _HALF,
                key_value_gradients=sequences * count * keys * _FULL,
                weight_gradients=sequences * count * (inputs + gradients) * _HALF,
                received=sequences * states if stage > 0 else 0.0,
                sent=sequences * states if stage < last else 0.0,
                fixed=(min(kept, WEIGHT) if stage < forward_only else kept) * parameters,
                gradient_sums=0.0 if weights_once else _FULL * parameters,
            )
        )
    return MemoryModel(tuple(stages))
