"""Cache of the outputs of frozen layers, by sample: files, samples as bytes, levels, and the stage that reads them."""
