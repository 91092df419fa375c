"""Hugging Face decoders in a sliced pipeline: their own layers in, their own folder out. Needs the extra ``hf``."""

from ds_terapipe.hf.batches import batch
from ds_terapipe.hf.decoder_pipeline import DecoderPipeline, pipeline
from ds_terapipe.hf.folder import check_new, export, save_pretrained
from ds_terapipe.hf.loss import CausalLMLoss

__all__ = ["CausalLMLoss", "DecoderPipeline", "batch", "check_new", "export", "pipeline", "save_pretrained"]
