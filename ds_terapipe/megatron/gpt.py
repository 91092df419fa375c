"""GPT as a DeepSpeed ``PipelineModule`` of megatron-core's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from ds_terapipe.megatron.common import PositionEmbedding, check_config, core_config, layout_of, position_table
from ds_terapipe.megatron.layers import Embedding, FinalNorm, GPTLayer, OutputHead, Rotary, tied_logits, with_vocabulary
from ds_terapipe.megatron.loss import TokenLoss
from ds_terapipe.megatron.on_cpu import replace_regions
from ds_terapipe.pipeline.documents import Documents
from ds_terapipe.staged_pipeline import StagedPipeline


class GPTPipeline(StagedPipeline):
    """A GPT.

    Layers: embedding, ``num_layers`` Transformer layers, final norm, output head. Input: (tokens, position ids), both
    [b, s] int64. Between layers: [s, b, hidden], with sequence parallelism this rank's share of s. Output: logits
    [s, b, vocabulary / tensor parallel size].
    """

    layer_class = GPTLayer
    document_end: int | None = None

    @property
    def documents_of(self) -> Callable[[tuple[Tensor, Tensor]], Documents | None] | None:
        """Finds the documents of a micro-batch, each of which ends with the token ``document_end``; None without one."""
        end = self.document_end
        return None if end is None else lambda inputs: _ended_by(end, inputs[0])


def _ended_by(end: int, tokens: Tensor) -> Documents | None:
    ended = (tokens[:, :-1] == end).cumsum(1)
    return Documents.of(F.pad(ended, (1, 0)) + 1)


def gpt_pipeline(
    config: TransformerConfig,
    *,
    vocab_size: int,
    seq_length: int,
    num_stages: int | None = None,
    topology: ProcessTopology | None = None,
    position_embedding: PositionEmbedding = "learned",
    tied: bool = True,
    max_position_embeddings: int | None = None,
    rotary_percent: float = 1.0,
    rotary_base: int = 10000,
    layers_per_stage: Sequence[int] | None = None,
    seed: int = 1234,
    loss_fn: Callable[..., Any] | None = None,
    document_end: int | None = None,
    **pipeline: Any,
) -> GPTPipeline:
    """Build a GPT as a pipeline. Every process calls it, after ``deepspeed.init_distributed``.

    The weights are those of ``seed``, whatever the layout: each layer draws its whole weights on the CPU from its own
    random stream and keeps its part of them.

    Args:
        config: megatron-core's description of the layers. ``tensor_model_parallel_size`` counts, the pipeline sizes don't.
        vocab_size: padded size of the vocabulary, a multiple of the tensor parallel size.
        seq_length: longest sequence in tokens.
        num_stages: pipeline stages; or
        topology: the layout, as :func:`initialize_parallel` returns it.
        position_embedding: ``"learned"`` (from the position ids) or ``"rope"`` (rotary).
        tied: whether the output head uses the word embedding.
        max_position_embeddings: size of the learned position table, default ``seq_length``.
        rotary_percent: part of the head dimension that is rotated.
        rotary_base: base of the rotary frequencies.
        layers_per_stage: Transformer layers of each stage, default even, earlier stages first.
        seed: of the initial weights.
        loss_fn: default :class:`TokenLoss`.
        document_end: token that ends a document; documents of a sample do not see each other, as with Megatron's
            ``--reset-attention-mask``. Needs an engine with ``token_pipeline``. None: a sample is one document.
        pipeline: further arguments of ``PipelineModule``, such as ``activation_checkpoint_interval``.

    Raises:
        ConfigError: a size that does not divide, a stage without a layer, or a setting that is not followed.
    """
    topology = layout_of(config, num_stages, topology)
    check_config(config, topology, shares_tokens=True, vocab_size=vocab_size)
    if config.sequence_parallel:
        replace_regions()
    positions = position_table(position_embedding, max_position_embeddings, seq_length)
    rotary = Rotary(rotary_percent, rotary_base) if positions is None else None
    config, last = core_config(config), config.num_layers + 1
    several = document_end is not None
    body = [LayerSpec(GPTLayer, config, number, rotary, seed + number, several) for number in range(1, last)]
    body.append(LayerSpec(FinalNorm, config))
    own = None if tied else LayerSpec(OutputHead, config, vocab_size, seed + last)
    specs = with_vocabulary(Embedding, (config, vocab_size, positions, seed), body, tied_logits, own)
    made = GPTPipeline(specs, layers_per_stage, topology, loss_fn=loss_fn or TokenLoss(), **pipeline)
    made.document_end = document_end
    return made
