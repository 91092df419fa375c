"""Defects of how a micro-batch is cut, and of whose memory a layer gets."""

from . import Known

_PACKED = "tests/pipeline/test_attention.py -k packed"
_SHARED = "tests/rows/test_rows.py -k 'fp64 and sequence'"

KNOWN = (
    Known("a slice is one token longer", "pipeline.slicing", "        return self.stop - self.start\n",
          "        return self.stop - self.start + 1\n", "tests/pipeline/test_slicing.py"),
    Known("sequences are run whole", "pipeline.slicing", "    stops = [*accumulate(lengths)]\n",
          "    lengths = (sum(lengths),)\n    stops = [*accumulate(lengths)]\n", "tests/pipeline/test_engine_layers.py"),
    Known("a layer writes into the user's data", "pipeline.training", "lambda: own(engine._next_batch())",
          "engine._next_batch", "tests/pipeline/test_engine_layers.py"),
    Known("slices share the memory that layers write into", "pipeline.slicing",
          "    return part.detach().clone() if shares else part.detach()\n", "    return part.detach()\n",
          "tests/pipeline/test_slicing.py -k writes_into"),
    Known("a layer behind a boundary gets a leaf", "pipeline.slicing",
          "[alias(t) if t.requires_grad else t.detach() for t in as_tuple(value)]", "list(as_tuple(value))",
          "tests/rows/test_rows.py -k writing"),
    Known("gradients of shared tokens are each rank's own", "pipeline.token_shares",
          "        dist.all_reduce(flat, group=group)\n", "", _SHARED),
    Known("a gradient of shared tokens lacks those of other ranks", "pipeline.operators.deferred",
          "shares.sum(of_input)", "shares.own(of_input)", _SHARED),
    Known("a document sees those before it", "pipeline.documents", "np.where(padding, inside, starts)",
          "np.where(padding, inside, 0)", _PACKED),
    Known("a document begins again in every slice", "pipeline.documents", "np.where(padding, inside, starts)", "inside", _PACKED),
    Known("keys of variable lengths lack those before the slice", "pipeline.documents",
          "self._segments[:, 1] + self.before - self.first]", "self._segments[:, 1] - self.first]",
          "tests/hf/test_batches.py -k see"),
    Known("the two parts of cuDNN's attention are weighted the wrong way round", "pipeline.operators.cudnn_attention",
          "torch.sigmoid(sums - earlier_sums)", "torch.sigmoid(earlier_sums - sums)", "tests/pipeline/test_kernels.py -k cudnn"),
    Known("documents stay on the first stage", "pipeline.transport.consensus",
          "return cast(Mapping[int, Documents], received[0])", "return {}",
          "tests/hf/test_pipeline.py -k 'decoder_freezes and qwen3'"),
    Known("slices of padding are run", "pipeline.batch", "if span.start < documents.used", "if True",
          "tests/hf/test_pipeline.py -k padding"),
    Known("cached stages compute with the documents of the first micro-batch", "elastic.cache.stage",
          "self._batch.documents.get(micro_batch)", "self._batch.documents.get(0)", "tests/rows -k packed"),
    Known("a cached sample is known without its documents", "elastic.cache.samples", "if documents is not None:", "if False:",
          "tests/elastic/test_cache_outputs.py -k name"),
    Known("a document ends before its last token", "megatron.gpt", "F.pad(ended, (1, 0))", "F.pad(ended, (0, 1))",
          "tests/megatron/test_data.py -k documents"),
)  # fmt: skip
