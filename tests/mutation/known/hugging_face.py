"""Ways in which a Hugging Face model can be another one in a pipeline than in one process."""

from . import Known

_TRAINED, _BATCHES = "tests/hf/test_slices.py", "tests/hf/test_batches.py"
_CUT = "        span = places.span\n        return cos[:, span.start : span.stop], sin[:, span.start : span.stop]\n"
_LORA = "tests/hf/test_lora.py"
_CALL = "is_causal=True, window=sliding_window, softcap=softcap,"

KNOWN = (
    Known("learned positions start at 0 in every slice", "hf.positions",
          "self.positions[:, self.span.start : self.span.stop]", "self.positions[:, : self.span.length]", _TRAINED),
    Known("rotary positions start at 0 in every slice", "hf.positions", _CUT,
          "        return cos[:, : places.span.length], sin[:, : places.span.length]\n", _TRAINED),
    Known("rotary frequencies look at a slice", "hf.positions", _CUT, "        more = [layer_type] if self._by_type else []\n"
          "        return copy.deepcopy(self._module)(hidden, places.here, *more)\n", _TRAINED),
    Known("padding and other documents are seen", "hf.positions", "(keys > 0) & ((keys == rows) | (rows <= 0))",
          "(keys == keys) & (rows == rows)", "tests/hf/test_pipeline.py -k script"),
    Known("a row of padding whose labels count is not run", "hf.batches", "~behind & real.any(1, keepdim=True)", "~behind",
          _BATCHES),
    Known("a slice's attention has no window", "hf.attention", _CALL, "is_causal=True, softcap=softcap,", _TRAINED),
    Known("a slice's attention has no soft cap", "hf.attention", _CALL, "is_causal=True, window=sliding_window,", _TRAINED),
    Known("keys before a slice in its window get no gradient", "pipeline.operators.buffers",
          "        if self._dk is None or self._dv is None:\n",
          "        if first:\n            dk[:, :, : start - first] = 0\n        if self._dk is None or self._dv is None:\n",
          "tests/pipeline/test_attention.py -k window"),
    Known("a token is to say itself", "hf.loss", "return F.pad(labels[:, 1:], (0, 1), value=IGNORED)", "return labels", _TRAINED),
    Known("the last token of a slice is to say nothing", "hf.loss", "outputs.float().flatten(0, 1), labels.flatten()",
          "outputs.float()[:, :-1].flatten(0, 1), labels[:, :-1].flatten()", _TRAINED),
    Known("the labels of a step are those of its first micro-batch", "hf.loss", "for one in labels])",
          "for one in labels[:1]])", "tests/hf/test_pipeline.py -k mean"),
    Known("logits have no soft cap", "hf.layers", "return logits if softcap is None", "return logits if True", _TRAINED),
    Known("dropout beside the layers is not noticed", "hf.check", ".double().train()", ".double().eval()",
          "tests/hf/test_weights.py -k passes"),
    Known("numbers of documents are read as ones", "hf.batches", "    if odd.numel():\n", "    if False:\n",
          f"{_BATCHES} -k said"),
    Known("weights of adapters are written as a model's", "hf.folder", "        if any(mark in name for mark in _ADAPTERS):\n",
          "        if False:\n", "tests/hf/test_weights.py -k says_what_is_wrong"),
    Known("an adapter is left out of the folder", "hf.folder", "    wanted = set(record[\"adapter\"].values())\n",
          "    wanted = {name for name in record[\"adapter\"].values() if \".layers.1.\" not in name}\n", _LORA),
    Known("a part of an adapter that is missing is not noticed", "hf.folder", "            if name not in parts:\n",
          "            if False:\n", f"{_LORA} -k missing"),
    Known("new adapters depend on the stages", "hf.adapters", "_joined(part, path)} lora", "path} lora", _LORA),
    Known("a checkpoint of DeepSpeed's trains no adapter behind a frozen embedding", "hf.layers",
          "            hidden.requires_grad_()\n", "            pass\n", f"{_LORA} -k trains"),
    Known("an adapter of another model is taken", "hf.adapters", "            if shape != wanted:\n", "            if False:\n",
          f"{_LORA} -k missing"),
)  # fmt: skip
