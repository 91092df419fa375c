"""ViT as a DeepSpeed ``PipelineModule`` of megatron-core's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology
from megatron.core.transformer.transformer_config import TransformerConfig

from ds_terapipe.errors import bad_value
from ds_terapipe.megatron.common import check_config, core_config, layout_of
from ds_terapipe.megatron.layers import FinalNorm
from ds_terapipe.megatron.loss import classification_loss
from ds_terapipe.megatron.vit_layers import Classes, Patches, ViTLayer
from ds_terapipe.staged_pipeline import StagedPipeline

Pool = Literal["class", "mean"]


class ViTPipeline(StagedPipeline):
    """A vision Transformer, which sees whole images: ``"slices": 1``.

    Layers: patches, ``num_layers`` Transformer layers, final norm, classes. Input: images [b, channels, height, width]. Between
    layers: [s, b, hidden]. Output: logits [b, classes].
    """

    layer_class = ViTLayer


def vit_pipeline(
    config: TransformerConfig,
    *,
    image: int | tuple[int, int],
    patch: int,
    classes: int,
    channels: int = 3,
    pool: Pool = "class",
    num_stages: int | None = None,
    topology: ProcessTopology | None = None,
    layers_per_stage: Sequence[int] | None = None,
    seed: int = 1234,
    loss_fn: Callable[..., Any] | None = None,
    **pipeline: Any,
) -> ViTPipeline:
    """Build a vision Transformer as a pipeline. Every process calls it, after ``deepspeed.init_distributed``.

    The weights are those of ``seed``, whatever the layout, as those of :func:`~ds_terapipe.megatron.gpt_pipeline`. What is not
    described here is as there.

    Args:
        config: megatron-core's description of the layers.
        image: side of an image in pixels, or height and width; multiples of ``patch``.
        patch: side of a patch.
        classes: of images.
        channels: of an image.
        pool: what classes are told from: ``"class"``, a class token, or ``"mean"``, that of all patches.
        num_stages: pipeline stages; or
        topology: the layout.
        layers_per_stage: Transformer layers of each stage, default even, earlier stages first.
        seed: of the initial weights.
        loss_fn: default the mean cross entropy of labels [b] int64.
        pipeline: further arguments of ``PipelineModule``.

    Raises:
        ConfigError: a size that does not divide, a stage without a layer, no such pool, or a setting that is not followed.
    """
    height, width = (image, image) if isinstance(image, int) else image
    if patch < 1 or height % patch or width % patch or not (height and width):
        use = f"{max(1, height // max(1, patch)) * max(1, patch)}"
        raise bad_value("image", [height, width], f"positive multiples of patch ({patch})", f"e.g. {use}")
    if pool not in ("class", "mean"):
        raise bad_value("pool", pool, '"class" or "mean"', '"class"')
    if classes < 2:
        raise bad_value("classes", classes, "at least 2", "2")
    topology = layout_of(config, num_stages, topology)
    check_config(config, topology)
    config = core_config(config)
    last = config.num_layers + 1
    specs = [
        LayerSpec(Patches, config, (height, width), patch, channels, pool == "class", seed),
        *(LayerSpec(ViTLayer, config, number, seed + number) for number in range(1, last)),
        LayerSpec(FinalNorm, config),
        LayerSpec(Classes, config, classes, pool == "class", seed + last),
    ]
    return ViTPipeline(specs, layers_per_stage, topology, loss_fn=loss_fn or classification_loss, **pipeline)
