"""Models of Hugging Face, where transformers is installed."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed, extra hf")
