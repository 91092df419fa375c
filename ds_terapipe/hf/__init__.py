"""Hugging Face decoders in a sliced pipeline: their own layers in, their own folder out. Needs the extra ``hf``."""

from ds_terapipe.hf.batches import batch
from ds_terapipe.hf.export import export, save_pretrained
from ds_terapipe.hf.loss import CausalLMLoss
from ds_terapipe.hf.pipeline import DecoderPipeline, pipeline

__all__ = ["CausalLMLoss", "DecoderPipeline", "batch", "export", "pipeline", "save_pretrained"]
