"""Checkpoints that are read though a file is damaged, foreign or of another save."""

from . import Known

_TESTS = "tests/pipeline/test_damage.py"

KNOWN = (
    Known("files are read that are not as they were saved", "manifest", "        if found == saved:\n",
          "        if True:\n", f"{_TESTS} -k 'each_damage and stages'"),
    Known("the archive's own checksums are believed when it is read", "manifest", "trusted = just_saved and",
          "trusted =", f"{_TESTS} -k byte_of_an_archive"),
    Known("checksums that torch.save was told to leave out are believed", "manifest",
          "just_saved and torch.serialization.get_crc32_options()", "just_saved", f"{_TESTS} -k just_saved"),
    Known("layers are read whatever weights are in the files", "pipeline.saved_files",
          "_check_layer(self._folder / name, layers[entry], wants.strict)", "pass", f"{_TESTS} -k without_a_manifest"),
    Known("what DeepSpeed saved over a checkpoint is called damaged", "manifest",
          "return not any(isinstance(block, Mapping) and", "return False and not any(isinstance(block, Mapping) and",
          f"{_TESTS} -k saved_over_it"),
    Known("a state of another placement keeps the old step counts", "elastic.moves.masters", "            old.clear()\n", "",
          "tests/pipeline/test_placing.py -k same_bits"),
    Known("places save states of their own", "elastic.saved.named", "not ModelChunks(engine.module).is_placed:", "True:",
          "tests/pipeline/test_placing.py -k same_bits"),
)  # fmt: skip
