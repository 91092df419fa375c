"""What frozen layers put out, kept by sample: files, samples as bytes, levels, and the stage that reads them."""
