"""Tasks of ``train.py``: models by Megatron's argument names, their data, and the batches of a process."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional as F

from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.megatron.bert import bert_pipeline
from ds_terapipe.megatron.bert_data import BertBatches, WordPieces, bert_datasets
from ds_terapipe.megatron.data import BatchIterator, SampleIterator, Vocabulary, gpt_datasets, parts_of
from ds_terapipe.megatron.gpt import gpt_pipeline
from ds_terapipe.megatron.images import ImageBatches, ImageFolder, image_datasets
from ds_terapipe.megatron.vit import vit_pipeline


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least ``least``."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"got {text}, must be an integer of {least} or more, use e.g. {least}")
        return value

    return number


positive = at_least(1)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help with the defaults of arguments that have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default is not None and action.default is not False
        return super()._get_help_string(action) if shown else action.help


def add_model_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the arguments of all models; each task checks those that its model needs."""
    add = group.add_argument
    add("--model", choices=list(TASKS), default="gpt", help="kind of model")
    add("--num-layers", type=positive, required=True, help="Transformer layers")
    add("--hidden-size", type=positive, required=True, help="width of the layers")
    add("--num-attention-heads", type=positive, required=True, help="attention heads of a layer")
    add(
        "--ffn-hidden-size",
        type=positive,
        help="width of the MLP (default: 4 times the hidden size, 8/3 times with --swiglu)",
    )
    add(
        "--num-query-groups",
        type=positive,
        help="key and value heads of a layer (default: one for each attention head)",
    )
    add("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm", help="kind of norms")
    add("--swiglu", action="store_true", help="use SwiGLU in the MLP, in place of GELU")
    add("--disable-bias-linear", action="store_true", help="leave out the biases of linear layers")
    add("--attention-dropout", type=float, default=0.0, help="dropout of attention weights")
    add("--hidden-dropout", type=float, default=0.0, help="dropout of hidden states")
    add("--init-method-std", type=float, default=0.02, help="standard deviation of the first weights")


def add_text_arguments(group: argparse._ArgumentGroup) -> None:
    """Arguments of GPT and BERT."""
    add = group.add_argument
    add("--seq-length", type=positive, help="tokens of a sample")
    add(
        "--max-position-embeddings",
        type=positive,
        help="rows of the table of learned positions (default: --seq-length)",
    )
    positions = ["learned_absolute", "rope"]
    add("--position-embedding-type", choices=positions, default=positions[0], help="kind of positions")
    add("--rotary-percent", type=float, default=1.0, help="share of a head that rotates, for rope")
    add("--rotary-base", type=positive, default=10000, help="base of the rotations, for rope")
    add("--vocab-size", type=positive, help="GPT: number of token ids in the data, before padding")
    add(
        "--make-vocab-size-divisible-by",
        type=positive,
        default=128,
        help="divisor of the padded vocabulary of a tensor-parallel rank",
    )
    add("--untie-embeddings-and-output-weights", action="store_true", help="give the head a weight of its own")
    add(
        "--sequence-parallel", action="store_true", help="GPT: divide tokens among tensor-parallel ranks between layers"
    )
    add("--data-path", nargs="+", help="prefix of a .bin and .idx file, or: weight prefix weight prefix ...")
    add("--reset-position-ids", action="store_true", help="GPT: restart positions in each document of a sample")
    add("--reset-attention-mask", action="store_true", help="GPT: keep attention within a document")
    add("--eod-id", type=int, help="GPT: token that ends a document, as prepare-data prints it (default: the last one)")
    add("--eod-mask-loss", action="store_true", help="GPT: leave the token after the end of a document out of the loss")
    add("--data-cache-path", help="folder for the order of samples (default: beside the data)")
    add(
        "--vocab-file",
        help="BERT: file with a token a line (default: bytes, as of prepare-data with --split-sentences)",
    )
    add("--mask-prob", type=float, default=0.15, help="BERT: share of tokens to predict")
    add("--short-seq-prob", type=float, default=0.1, help="BERT: share of samples that are shorter than --seq-length")


def add_image_arguments(group: argparse._ArgumentGroup) -> None:
    """Arguments of ViT."""
    add = group.add_argument
    add("--data", metavar="DIR", help="folder with a folder of images for each class")
    add("--img-h", type=positive, default=224, help="height of an image in pixels")
    add("--img-w", type=positive, default=224, help="width of an image in pixels")
    add("--patch-dim", type=positive, default=16, help="side of a patch in pixels")
    add("--num-channels", type=int, choices=[1, 3], default=3, help="colours of an image")


class Task(ABC):
    """A model and its data, as the arguments of ``train.py`` describe them.

    Args:
        args: parsed arguments.

    Attributes:
        needs: arguments that this model has to have.
        iterator: makes batches of its samples.
        seq_length: tokens or patches of a sample.
        order_of_all: whether the order of samples depends on how many there are in the whole training, as megatron-core's.

    Raises:
        ConfigError: an argument is missing or wrong.
    """

    needs: tuple[str, ...] = ()
    iterator: type[SampleIterator]
    order_of_all = True

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.seq_length = args, args.seq_length
        missing = [name for name in self.needs if getattr(args, name.removeprefix("--").replace("-", "_")) is None]
        if missing:
            raise ConfigError(f"the following arguments are required: {', '.join(missing)}")
        parts_of(args.split)
        if args.sequence_parallel and (args.model != "gpt" or args.tensor_model_parallel_size == 1):
            got = f"{args.model} with {args.tensor_model_parallel_size} tensor-parallel rank(s)"
            rule = "gpt with several that share its tokens"
            raise bad_value("--sequence-parallel", got, rule, "--tensor-model-parallel-size 2 or leave it out")
        self._check_heads()

    @abstractmethod
    def model(self) -> nn.Module:
        """The pipeline; collective."""

    @abstractmethod
    def datasets(self, steps: Mapping[int, int], validation: int, needed: Callable[[], bool]) -> tuple[Any, Any]:
        """Samples to train and to validate with; collective.

        Args:
            steps: how many samples of each length the training takes.
            validation: how many there are to validate with.
            needed: whether this process reads data.
        """

    def batches(self, dataset: Any, micro_batch: int | Callable[[], int], **share: int) -> SampleIterator:
        """Return micro-batches of the result of `datasets`; ``share``: see `SampleIterator`."""
        return self.iterator(dataset, micro_batch, **share)

    def _check_heads(self) -> None:
        heads, groups = self.args.num_attention_heads, self.args.num_query_groups
        tensor = self.args.tensor_model_parallel_size
        multiple = f"a multiple of --tensor-model-parallel-size ({tensor})"
        if heads % tensor:
            raise bad_value("--num-attention-heads", heads, multiple, f"e.g. {-(-heads // tensor) * tensor}")
        if groups and (heads % groups or groups % tensor):
            rule = f"a divisor of --num-attention-heads ({heads}) and {multiple}"
            raise bad_value("--num-query-groups", groups, rule, f"e.g. {heads}")

    def _config(self) -> TransformerConfig:
        args = self.args
        activation = {"activation_func": F.silu, "gated_linear_unit": True} if args.swiglu else {}
        return TransformerConfig(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups,
            ffn_hidden_size=args.ffn_hidden_size or (int(args.hidden_size * 8 / 3 / 64) * 64 if args.swiglu else None),
            normalization=args.normalization,
            add_bias_linear=not args.disable_bias_linear,
            attention_dropout=args.attention_dropout,
            hidden_dropout=args.hidden_dropout,
            init_method_std=args.init_method_std,
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            sequence_parallel=args.sequence_parallel,
            **activation,
        )

    def _stages(self) -> dict[str, Any]:
        args = self.args
        return {
            "num_stages": args.pipeline_model_parallel_size,
            "layers_per_stage": args.stage_layers,
            "seed": args.seed,
        }

    def _text(self, vocab_size: int) -> dict[str, Any]:
        """Arguments that GPT and BERT are built with."""
        args = self.args
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        return {
            "vocab_size": -(-vocab_size // multiple) * multiple,
            "seq_length": args.seq_length,
            "position_embedding": "rope" if args.position_embedding_type == "rope" else "learned",
            "max_position_embeddings": args.max_position_embeddings,
            "rotary_percent": args.rotary_percent,
            "rotary_base": args.rotary_base,
            "tied": not args.untie_embeddings_and_output_weights,
            **self._stages(),
        }

    def _check_lengths(self, steps: Iterable[int]) -> None:
        """Check the lengths of all phases at the start: the longest may come last, after days."""
        longest = max(steps)
        if longest > self.seq_length:
            raise bad_value(
                "--seq-length", self.seq_length, f"that of the longest phase ({longest}) or more", str(longest)
            )

    def _text_data(self) -> dict[str, Any]:
        args = self.args
        return {"split": args.split, "seed": args.seed, "cache_path": args.data_cache_path}


class GPTTask(Task):
    """``--model gpt``."""

    needs = ("--seq-length", "--vocab-size", "--data-path")
    iterator = BatchIterator

    def model(self) -> nn.Module:
        end = Vocabulary(self.args.vocab_size, self.args.eod_id).eod if self.args.reset_attention_mask else None
        return gpt_pipeline(self._config(), document_end=end, **self._text(self.args.vocab_size))

    def datasets(self, steps: Mapping[int, int], validation: int, needed: Callable[[], bool]) -> tuple[Any, Any]:
        self._check_lengths(steps)
        train, valid, _ = gpt_datasets(
            self.args.data_path,
            vocab_size=self.args.vocab_size,
            seq_length=self.seq_length,
            samples=[sum(steps.values()), validation, 0],
            eod_id=self.args.eod_id,
            needed=needed,
            reset_position_ids=self.args.reset_position_ids,
            eod_mask_loss=self.args.eod_mask_loss,
            **self._text_data(),
        )
        return train, valid


class BertTask(Task):
    """``--model bert``: masked tokens and the order of two sentences."""

    needs = ("--seq-length", "--data-path")
    iterator = BertBatches

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.vocabulary = WordPieces.read(args.vocab_file) if args.vocab_file else WordPieces.of_bytes()

    def model(self) -> nn.Module:
        return bert_pipeline(self._config(), **self._text(self.vocabulary.vocab_size))

    def datasets(self, steps: Mapping[int, int], validation: int, needed: Callable[[], bool]) -> tuple[Any, Any]:
        def made(seq_length: int, samples: Sequence[int]) -> list[Any]:
            return bert_datasets(
                self.args.data_path,
                vocabulary=self.vocabulary,
                seq_length=seq_length,
                samples=samples,
                mask_prob=self.args.mask_prob,
                short_seq_prob=self.args.short_seq_prob,
                needed=needed,
                **self._text_data(),
            )

        self._check_lengths(steps)
        train = {length: made(length, [samples, 0, 0])[0] for length, samples in steps.items()}
        valid = made(self.seq_length, [0, validation, 0])[1] if validation else None
        return train, {self.seq_length: valid}


class ViTTask(Task):
    """``--model vit``: classes of images."""

    needs = ("--data",)
    iterator = ImageBatches
    order_of_all = False

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.seq_length = (args.img_h // args.patch_dim) * (args.img_w // args.patch_dim) + 1
        self.folder = ImageFolder(args.data)

    def model(self) -> nn.Module:
        args = self.args
        return vit_pipeline(
            self._config(),
            image=(args.img_h, args.img_w),
            patch=args.patch_dim,
            channels=args.num_channels,
            classes=len(self.folder.classes),
            **self._stages(),
        )

    def datasets(self, steps: Mapping[int, int], validation: int, needed: Callable[[], bool]) -> tuple[Any, Any]:
        args = self.args
        train, valid, _ = image_datasets(
            self.folder,
            samples=[sum(steps.values()), validation, 0],
            size=(args.img_h, args.img_w),
            channels=args.num_channels,
            split=args.split,
            seed=args.seed,
        )
        return train, valid


TASKS: dict[str, type[Task]] = {"gpt": GPTTask, "bert": BertTask, "vit": ViTTask}
