"""The layers of a ViT pipeline: patches of an image, Transformer layers without a mask, classes.

A vision Transformer as Dosovitskiy et al. (ICLR 2021) have it: pre-norm layers, learned positions, classes from a class token
or from the mean over the patches.
"""

from __future__ import annotations

from typing import cast

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ds_terapipe.megatron.bert_layers import encoder_spec, linear
from ds_terapipe.megatron.layers import CoreLayer, random_stream, table


class Patches(nn.Module):
    """Images as sequences of patches, the class token, where there is one, before them.

    Args:
        config: of the layers.
        image: height and width in pixels.
        patch: side of a square patch.
        channels: of an image.
        class_token: whether there is one.
        seed: of the initial weights.
    """

    def __init__(
        self, config: TransformerConfig, image: tuple[int, int], patch: int, channels: int, class_token: bool, seed: int
    ) -> None:
        super().__init__()
        length = (image[0] // patch) * (image[1] // patch) + class_token
        with random_stream(seed):
            self.project = nn.Conv2d(channels, config.hidden_size, patch, stride=patch, dtype=config.params_dtype)
            self.position_embeddings = table(config, length)
            self.class_token = None
            if class_token:
                self.class_token = nn.Parameter(torch.zeros(config.hidden_size, dtype=config.params_dtype))
            if config.perform_initialization:
                config.init_method(self.project.weight)
                nn.init.zeros_(cast(Tensor, self.project.bias))
                if self.class_token is not None:
                    config.embedding_init_method(self.class_token)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Images [b, channels, height, width] to [s, b, hidden]."""
        hidden = self.project(images.to(self.project.weight.dtype)).flatten(2).permute(2, 0, 1)
        if self.class_token is not None:
            hidden = torch.cat([self.class_token.expand(1, hidden.shape[1], -1), hidden])
        positions = torch.arange(len(hidden), device=hidden.device)
        return cast(Tensor, self.dropout(hidden + self.position_embeddings(positions)[:, None]))


class ViTLayer(CoreLayer):
    """A Transformer layer in which every patch sees all patches."""

    def __init__(self, config: TransformerConfig, number: int, seed: int) -> None:
        super().__init__(config, encoder_spec(config, AttnMaskType.no_mask), number, None, seed)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, hidden] to the same."""
        return self.run(hidden)


class Classes(nn.Module):
    """Classes of an image, by the class token or the mean over the patches: [s, b, hidden] to [b, classes]."""

    def __init__(self, config: TransformerConfig, classes: int, class_token: bool, seed: int) -> None:
        super().__init__()
        self.class_token = class_token
        with random_stream(seed):
            self.classifier = linear(config, classes)

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(hidden[0] if self.class_token else hidden.mean(dim=0)))
