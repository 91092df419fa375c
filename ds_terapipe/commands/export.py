"""Turn a checkpoint of a Hugging Face pipeline into a folder for from_pretrained.

Turn a checkpoint of a pipeline of ds_terapipe.hf.pipeline into a folder that AutoModelForCausalLM.from_pretrained
loads. Stages, replicas and ZeRO-1 may be any.

example:
  ds_terapipe export checkpoints/global_step100 model --dtype bf16
  ds_terapipe export checkpoints model                                 the latest
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_terapipe.commands.output import show
from ds_terapipe.errors import ConfigError

_TYPES = ("fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a step, or of all steps: the latest one counts"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=_TYPES,
        help="type of the weights (default: fp32 where the checkpoint has fp32 masters, otherwise the saved type)",
    )


def run(options: argparse.Namespace) -> None:
    """Write the folder, and print its size."""
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as problem:
        raise ConfigError(f"got no {problem.name}, must be installed, use pip install ds_terapipe[hf]") from problem
    from ds_terapipe.hf import folder
    from ds_terapipe.pipeline.checkpoints import tag_of

    checkpoint: Path = options.checkpoint
    checkpoint = checkpoint / (tag_of(checkpoint, None, "export") or "")
    if not checkpoint.is_dir():
        raise ConfigError(f"got {checkpoint}, must be the folder of a checkpoint, use e.g. CHECKPOINTS/global_step100")
    dtypes = dict(zip(_TYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
    out = folder.export(checkpoint, options.out, dtypes.get(options.dtype))
    sizes = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
    show(
        options, f"{out}: {len(sizes)} files, {sum(sizes.values()) / 1e6:.1f} MB", {"folder": str(out), "bytes": sizes}
    )
