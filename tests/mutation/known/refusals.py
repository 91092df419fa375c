"""Refusals that refuse nothing: what must end a run with one line of error trains on, or is read though it is damaged."""

from . import Known

_REFUSED = "tests/test_refusals.py -k "
_BAD = "tests/pipeline/test_bad_input.py -k "
_DAMAGE = "tests/pipeline/test_damage.py"

KNOWN = (
    Known("no key is refused", "rules", "        if value is not _ABSENT and rule.refused(value) and rule.when(config):\n",
          "        if False:\n", _REFUSED + "ordinary_configs"),
    Known("values that DeepSpeed cannot use are let pass", "refusals.deepspeed_keys", "    check((rule for rule in VALUE_RULES",
          "    return\n    check((rule for rule in VALUE_RULES", _REFUSED + "stands_in"),
    Known("whole numbers may be as large as one likes", "blocks", "Field(strict=True, ge=1, le=LARGEST_COUNT)",
          "Field(strict=True, ge=1)", "tests/test_config.py -k granularity-9007"),
    Known("no layer is refused", "refusals.models", "        for found in (*_CUT_RULES, *_RULES) if cut else _RULES:\n",
          "        for found in ():\n", _REFUSED + "'same_line and experts'"),
    Known("what another rank finds is not raised", "job", "            if theirs is not None:", "            if False:",
          "tests/pipeline/test_consensus.py -k two_jobs"),
    Known("unknown keys are accepted", "blocks", "                raise unknown_key(cls.PATH, name, cls.model_fields)\n",
          "                pass\n", "tests/test_config.py -k xyzzy"),
    Known("misspelt keys beside ours are accepted", "register", "alike = nearest(key, KEYS, ALIKE) if",
          "alike = None if", _REFUSED + "'same_line and config'"),
    Known("verify finds no difference", "pipeline.inspection.differences",
          "    if not part.is_floating_point():\n        return float(",
          "    return 0.0\n    if not part.is_floating_point():\n        return float(", "tests/pipeline/test_verify.py"),
    Known("verify compares nothing", "pipeline.inspection.verify",
          "        again = copy_of(inputs)\n        self._run(inputs, span)\n",
          "        return\n        again = copy_of(inputs)\n        self._run(inputs, span)\n", "tests/pipeline/test_verify.py"),
    Known("a difference that one tensor-parallel rank finds is its own", "pipeline.inspection.verify",
          "largest(self._gather(differences(self._text, expected, got, span, batch)))",
          "differences(self._text, expected, got, span, batch)", "tests/megatron/test_layers.py -k on_all"),
    Known("settings are not compared between ranks", "pipeline.transport.consensus", "        if lows[1:3] != highs[1:3]:\n",
          "        if lows[2:3] != highs[2:3]:\n", _BAD + "models_and_settings"),
    Known("labels are not compared with inputs", "pipeline.transport.consensus",
          "    if any(labels) and [*labels] != [*inputs]:\n", "    if False:\n", _BAD + "lets_the_error_pass"),
    Known("files are read that are not as they were saved", "manifest", "        if found == saved:\n",
          "        if True:\n", f"{_DAMAGE} -k 'each_damage and stages'"),
    Known("the archive's own checksums are believed when it is read", "manifest", "trusted = just_saved and",
          "trusted =", f"{_DAMAGE} -k byte_of_an_archive"),
    Known("checksums that torch.save was told to leave out are believed", "manifest",
          "just_saved and torch.serialization.get_crc32_options()", "just_saved", f"{_DAMAGE} -k just_saved"),
    Known("layers are read whatever weights are in the files", "pipeline.saved_files",
          "_check_layer(self._folder / name, layers[entry], wants.strict)", "pass", f"{_DAMAGE} -k without_a_manifest"),
    Known("what DeepSpeed saved over a checkpoint is called damaged", "manifest",
          "return not any(isinstance(block, Mapping) and", "return False and not any(isinstance(block, Mapping) and",
          f"{_DAMAGE} -k saved_over_it"),
    Known("a state of another placement keeps the old step counts", "elastic.moves.masters", "            old.clear()\n", "",
          "tests/pipeline/test_placing.py -k same_bits"),
    Known("places save states of their own", "elastic.saved.named", "not ModelChunks(engine.module).is_placed:", "True:",
          "tests/pipeline/test_placing.py -k same_bits"),
)  # fmt: skip
