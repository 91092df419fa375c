"""GPT, BERT and ViT as DeepSpeed PipelineModules made of megatron-core's modules. Needs megatron-core."""

from __future__ import annotations

import warnings

from ds_terapipe.compat import MEGATRON_CORE, say_untested

try:
    with warnings.catch_warnings():
        # One warning for each fused kernel that is not installed, on every process; none of them is used here.
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
        from ds_terapipe.megatron.bert import BertPipeline, bert_pipeline
        from ds_terapipe.megatron.gpt import GPTPipeline, gpt_pipeline
        from ds_terapipe.megatron.vit import ViTPipeline, vit_pipeline
except ImportError as error:
    if (error.name or "").partition(".")[0] != "megatron":
        raise
    try:
        _found, _wanted, _use = MEGATRON_CORE.texts()
    except ImportError:
        raise ImportError(
            f"ds_terapipe.megatron needs megatron-core ({error}): pip install ds_terapipe[megatron]"
        ) from error
    raise ImportError(
        f"ds_terapipe.megatron: {_found} does not fit ({error}), must be {_wanted}, use {_use}"
    ) from error
from ds_terapipe.megatron.loss import PretrainingLoss, TokenLoss
from ds_terapipe.megatron.parallel import destroy_parallel, initialize_parallel

say_untested(MEGATRON_CORE, "ds_terapipe.megatron")

__all__ = [
    "BertPipeline",
    "GPTPipeline",
    "PretrainingLoss",
    "TokenLoss",
    "ViTPipeline",
    "bert_pipeline",
    "destroy_parallel",
    "gpt_pipeline",
    "initialize_parallel",
    "vit_pipeline",
]
